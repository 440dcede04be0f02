"""Errors of models whose float32 tensors meet 16-bit weights: they name the part or method, and the entry."""

import ast
import copy
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import marked_for
from models import Parts, quietly, sgd
from torch import Tensor, nn
from torch.nn import functional as F

import mpinit

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LEVELS = {"O2": {}, "O3": {}, "O5": {}, "O5, split": {"master_weights": "split"}}


class Tower(nn.Module):
    """An encoder as CLIP's: it projects by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.proj = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Encode inputs."""
        return self._project(self.body(x)) * scale

    def _project(self, x: Tensor) -> Tensor:
        return x @ self.proj


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = Tower(), Tower(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.image(x) * self.text(x))

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head.weight, self.head.bias)

    def sample(self, x: Tensor) -> Tensor:
        return self.logits(self.image(x)).softmax(-1)

    def penalty(self) -> Tensor:
        return self.head.weight.square().sum()

    @staticmethod
    def weight_of(model: "Clip") -> Tensor:
        return model.head.weight


def entry_of(error: pytest.ExceptionInfo[RuntimeError], keyword: str = "entry_points") -> list[str]:
    found = re.search(rf"{keyword}=(\[.*?\])", str(error.value))
    assert found is not None, error.value
    return list(ast.literal_eval(found[1]))


def made(level: str, **more: Any) -> Clip:
    model = Clip()
    quietly(model, level.partition(",")[0], **LEVELS[level], **more)
    return model


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("call", "method", "entry"),
    [
        (lambda model, x: model.image.encode(x), "encode", "image.encode"),
        (lambda model, x: model.text.encode(x, scale=2.0), "encode", "text.encode"),
        (lambda model, x: model.sample(x), "sample", "sample"),
        (lambda model, x: model.logits(x[:, :3]), "logits", "logits"),
    ],
)
def test_error_names_the_method_that_was_called_and_the_entry_that_helps(
    level: str, call: Any, method: str, entry: str
) -> None:
    x = torch.randn(2, 4)
    with pytest.raises(RuntimeError, match=f"'{method}' of .* was called from outside") as caught:
        call(made(level), x)
    assert entry_of(caught) == [entry]
    plain, model = Clip(), made(level, entry_points=entry_of(caught))
    assert call(model, x).dtype is F32
    assert torch.allclose(call(model, x), call(plain, x), atol=0.05)


@pytest.mark.parametrize("level", LEVELS)
def test_methods_are_as_they_were_but_for_their_errors(level: str) -> None:
    model = made(level)
    assert model(torch.randn(2, 4)).dtype is F32
    assert torch.equal(model.penalty(), model.head.weight.square().sum())
    assert "weight_of" not in vars(model) and "penalty" in vars(model)
    assert list(inspect.signature(model.image.encode).parameters) == ["x", "scale"]
    assert model.image.encode.__doc__ == "Encode inputs." and inspect.ismethod(model.image.encode)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.logits(torch.randn(2, 4, dtype=model.head.weight.dtype))
    with pytest.raises(TypeError, match="scala"):
        model.image.encode(torch.randn(2, 4), scala=2.0)
    mpinit.undo(model)
    assert not {"logits", "sample", "penalty"} & set(vars(model)) and "encode" not in vars(model.image)
    assert model.sample(torch.randn(2, 4)).dtype is F32


def test_copies_run_their_own_weights() -> None:
    model = made("O5")
    copied, read = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    x = torch.randn(2, 3)
    for each in (copied, read):
        with torch.no_grad():
            each.head.weight.zero_()
            each.head.bias.zero_()
        assert each.logits(x.to(each.head.weight.dtype)).abs().sum() == 0
    assert model.logits(x.bfloat16()).abs().sum() > 0


def test_a_compiled_method_is_one_graph() -> None:
    model = made("O5", entry_points="sample")
    x = torch.randn(2, 4)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model.sample, fullgraph=True, backend="eager")(x), model.sample(x))
    plain = made("O5")
    compiled = torch.compile(plain, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), plain(x))
    project = torch.compile(plain.logits, fullgraph=True, backend="eager")
    narrow = torch.randn(2, 3).bfloat16()
    assert torch.equal(project(narrow), plain.logits(narrow))


def policy(self: Any, x: Tensor) -> Tensor:
    """A policy like Stable-Baselines3's, whose preprocessing makes float32 tensors."""
    return self.head(self.body(x.float()))


@pytest.mark.parametrize("level", [*LEVELS, "O5, model"])
def test_a_forward_that_makes_float32_names_the_part_and_the_entry_that_casts(level: str) -> None:
    def plain() -> Any:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        return Parts(policy, body=body, head=nn.Linear(4, 2))

    def build(**more: Any) -> Any:
        model = plain()
        masters = LEVELS.get(level, {"master_weights": "model"})
        return quietly(model, level.partition(",")[0], loss_scale=1.0, **masters, **more)

    reference, x = plain(), torch.randn(3, 4)
    with pytest.raises(RuntimeError, match=r"'body.0' \(Linear\) has failed in a forward of Parts") as caught:
        build()(x)
    assert entry_of(caught) == ["body.0.forward"]
    model = build(entry_points=entry_of(caught))
    seen: list[torch.dtype] = []
    model.body[0].register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    out = model(x)
    assert out.dtype is F32 and seen == [F16 if level in ("O2", "O3") else BF16]
    assert torch.allclose(out, reference(x), atol=0.03)
    assert model.body[0](x).dtype is F32, "called from outside"
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_block_that_makes_float32_itself_is_named_for_keep_fp32() -> None:
    def build(**more: Any) -> Any:
        block = Parts(lambda self, x: x.float() @ self.weight)
        block.weight = nn.Parameter(torch.ones(4, 4))
        return quietly(Parts(lambda self, x: self.head(self.block(x)), block=block, head=nn.Linear(4, 2)), "O5", **more)

    with pytest.raises(RuntimeError, match="'block'") as caught:
        build()(torch.ones(1, 4))
    assert entry_of(caught, "keep_fp32") == ["block"]
    assert build(keep_fp32=["block"])(torch.ones(1, 4)).dtype is F32


def test_a_model_that_makes_float32_for_its_own_weights_is_told_the_levels_that_cast() -> None:
    def build(level: str) -> Any:
        model = Parts(lambda self, x: x.float() @ self.weight)
        model.weight = nn.Parameter(torch.ones(4, 4))
        return quietly(model, level)

    with pytest.raises(RuntimeError, match="opt_level='O1' or 'O4'"):
        build("O5")(torch.ones(1, 4))
    assert build("O4")(torch.ones(1, 4)).dtype is BF16, "as torch.autocast returns it"


def test_recurrent_layers_are_named_too() -> None:
    model: Any = Parts(lambda self, x: self.rnn(x.float())[0], rnn=nn.LSTM(4, 4))
    with pytest.raises(RuntimeError, match="'rnn'") as caught:
        quietly(model, "O2")(torch.ones(2, 1, 4))
    assert entry_of(caught) == ["rnn.forward"]


class BoxLoss:
    """A loss beside the layers that writes boxes in place, as that of Ultralytics."""

    def __call__(self, predicted: Tensor, boxes: Tensor) -> Tensor:
        padded = torch.zeros(len(predicted), 2)
        padded[torch.ones(len(boxes), dtype=torch.bool)] = boxes
        return (predicted - padded).square().mean()


class Detector(nn.Module):
    """A model whose forward computes the loss, too, where its input has targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.criterion = BoxLoss()

    def forward(self, x: Any) -> Tensor:
        return self.loss(x) if isinstance(x, dict) else self.predict(x)

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.criterion(self.predict(batch["x"]), batch["boxes"])


class Trained(nn.Module):
    """A model inside of another, which has a small part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.offset = Detector(), nn.Linear(4, 4)

    def forward(self, x: Any) -> Tensor:
        return self.net({**x, "x": self.offset(x["x"])})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kind", "parts"), [(Detector, "model.layers"), (Trained, "[model.offset, model.net.layers]")])
def test_a_loss_that_fails_in_forward_is_named_with_the_parts_to_initialize(kind: Any, parts: str, level: str) -> None:
    batch = {"x": torch.randn(8, 4), "boxes": torch.rand(8, 2)}
    losses = []
    for how in ("float32", "whole", "parts"):
        torch.manual_seed(0)
        model = kind()
        optimizer = sgd(model)
        keywords: dict[str, Any] = {"verbosity": 0, "loss_scale": 1.0, **LEVELS[level]}
        if how == "whole":
            mpinit.initialize(model, optimizer, level.partition(",")[0], **keywords)
            with pytest.raises(RuntimeError, match=r"in its method 'loss' \(in BoxLoss.__call__: test_dtype") as caught:
                model(batch)
            found = re.search(r"mpinit\.initialize\((.*), \.\.\.\)", str(caught.value))
            assert found is not None and found[1] == parts, caught.value
            continue
        if how == "parts":
            named = eval(parts, {"model": model})
            mpinit.initialize(named, optimizer, level.partition(",")[0], **keywords)
        for _ in range(20):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_forward_of_an_entry_point_is_named() -> None:
    def sample(self: Any, count: int) -> Tensor:
        return torch.ones(count, 4) @ self.weight

    kind = type("Sampler", (Parts,), {"sample": sample})
    model = kind(lambda self, x: x @ self.weight)
    model.weight = nn.Parameter(torch.ones(4, 4))
    quietly(model, "O5", entry_points="sample")
    with pytest.raises(RuntimeError, match="sample of Sampler has failed where float32 tensors meet its bfloat16"):
        model.sample(2)


def call_with(layer: nn.Linear, values: dict[str, Tensor], x: Tensor) -> Tensor:
    """Call a layer with other tensors in the place of its parameters, as tensordict's ``to_module`` puts them there."""
    own = dict(layer._parameters)
    layer._parameters.clear()
    vars(layer).update(values)
    try:
        return layer(x)
    finally:
        for name in values:
            del vars(layer)[name]
        layer._parameters.update(own)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", ["a layer", "a layer in a forward", "a layer that is no part"])
def test_weights_of_another_object_are_explained(where: str, level: str) -> None:
    outside = nn.Linear(4, 4)
    target = {name: value.detach().clone() for name, value in outside.named_parameters()}

    def run(self: Any, x: Tensor) -> Tensor:
        layer = outside if where == "a layer that is no part" else self.layer
        return self.layer(x) + call_with(layer, target, x)

    def build(level: str) -> Any:
        torch.manual_seed(0)
        model = Parts(run, layer=nn.Linear(4, 4))
        keywords = LEVELS.get(level, {})
        quietly(model, level.partition(",")[0], **keywords)
        return model

    def call(model: Any) -> Tensor:
        x = torch.ones(2, 4)
        return call_with(model.layer, target, x) if where == "a layer" else model(x)

    with pytest.raises(RuntimeError, match=r"has failed in a Linear whose weights another object.*'O1' or 'O4'"):
        call(build(level))
    expected = call(build("O0"))
    assert torch.allclose(call(build("O4")).float(), expected, atol=0.05)


class Policy(nn.Module):
    """A policy as Stable-Baselines3's with state-dependent exploration, called with observations of NumPy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.log_std = nn.Parameter(torch.zeros(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) @ self.log_std.exp()

    def actions(self, x: Tensor) -> Tensor:
        return self(x) + x @ self.log_std

    def predict(self, observation: Any) -> Any:
        return self.actions(torch.from_numpy(observation)).detach().numpy()


@pytest.mark.parametrize("level", LEVELS)
def test_the_entry_is_the_method_that_is_called_with_tensors(level: str) -> None:
    observation = np.ones((2, 4), dtype=np.float32)

    def build(**more: Any) -> Any:
        return quietly(Policy(), level.partition(",")[0], **LEVELS[level], **more)

    with pytest.raises(RuntimeError, match="'actions' of Policy was called from outside") as caught:
        model = build()
        model.predict(observation)
    assert entry_of(caught) == ["actions"]
    model = build(entry_points=entry_of(caught))
    assert model.predict(observation) == pytest.approx(Policy().predict(observation), abs=0.05)


def test_an_entry_point_that_makes_an_array_of_bfloat16_is_explained() -> None:
    def predict(self: Any, x: Any) -> Any:
        return self.body(torch.from_numpy(x)).detach().numpy()

    model = type("Policy", (Parts,), {"predict": predict})(lambda self, x: self.body(x), body=nn.Linear(4, 4))
    quietly(model, "O5", entry_points=["predict", "body.forward"])
    with pytest.raises(TypeError, match=r"predict of Policy makes a NumPy array.*name in entry_points the methods"):
        model.predict(np.ones((2, 4), dtype=np.float32))
    mpinit.undo(model)
    quietly(model, "O5")
    assert model.predict(np.ones((2, 4), dtype=np.float32)).dtype == np.float32


def test_methods_that_read_buffers_and_lists_of_parameters_are_named() -> None:
    def project(self: Any, x: Tensor) -> Tensor:
        return x @ self.filters

    def mix(self: Any, x: Tensor) -> Tensor:
        return x @ self.weights[0]

    kind = type("Filters", (Parts,), {"project": project, "mix": mix})
    model = kind(lambda self, x: self.mix(self.project(x)))
    model.weights = nn.ParameterList([torch.ones(4, 4)])
    model.register_buffer("filters", torch.ones(4, 4))
    model.register_buffer("counts", torch.ones(4, dtype=torch.int64))
    quietly(model, "O2")
    for name in ("project", "mix"):
        with pytest.raises(RuntimeError, match=f"'{name}' of Filters was called from outside") as caught:
            getattr(model, name)(torch.ones(1, 4))
        assert entry_of(caught) == [name]


@marked_for("stable_baselines3")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ["PPO", "A2C", "DQN", "SAC"])
def test_policies_of_stable_baselines_learn_with_the_entries_that_errors_name(algorithm: str) -> None:
    import stable_baselines3 as sb3

    entries: list[str] = []
    for _ in range(6):
        few: dict[str, Any] = {"n_steps": 16, "batch_size": 16} if algorithm == "PPO" else {}
        if algorithm in ("DQN", "SAC"):
            few = {"learning_starts": 8}
        game = "Pendulum-v1" if algorithm == "SAC" else "CartPole-v1"
        agent = getattr(sb3, algorithm)("MlpPolicy", game, seed=0, device="cpu", **few)
        if algorithm == "SAC":
            models: Any = [agent.actor, agent.critic, agent.critic_target]
            optimizers: Any = [agent.actor.optimizer, agent.critic.optimizer]
        else:
            models, optimizers = agent.policy, agent.policy.optimizer
        mpinit.initialize(models, optimizers, "O5", entry_points=entries)
        try:
            agent.learn(32)
        except RuntimeError as error:
            found = re.search(r"entry_points=(\[.*?\])", str(error))
            assert found is not None, error
            entries += ast.literal_eval(found[1])
        else:
            break
    else:
        pytest.fail(f"no end of {entries}")
    assert entries and {p.dtype for p in agent.policy.parameters() if p.ndim == 2} == {BF16}
    state = agent.policy.state_dict()
    assert all(value.isfinite().all() for value in state.values())
