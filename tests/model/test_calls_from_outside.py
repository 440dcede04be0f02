"""Methods that are called from outside of a forward, and entry points."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from casts import in_thread
from models import Parts, quietly, sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpinit

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Autoencoder(nn.Module):
    """Has its parts called by themselves, as a LightningModule's training_step does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.norm = nn.BatchNorm1d(4)
        self.decoder = nn.Linear(4, 4)
        self.loss = nn.MSELoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(self.forward_features(x)))

    def forward_features(self, x: Tensor, scale: float = 1.0) -> Tensor:
        assert x.dtype is self.encoder[0].weight.dtype, "a method finds the types that forward finds"
        return self.encoder(x) * scale

    def training_step(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.decoder(self.norm(self.encoder(x))), target)


def by_hand(model: Autoencoder, x: Tensor, dtype: torch.dtype) -> Tensor:
    first, _, last = model.encoder
    hidden = F.relu(F.linear(x.to(dtype), first.weight, first.bias))
    return F.linear(hidden, last.weight, last.bias).float()


LEVELS = {"O2": F16, "O3": F16, "O5": BF16}


@pytest.mark.parametrize("level", LEVELS)
def test_a_part_called_by_itself_has_its_inputs_and_outputs_cast(level: str) -> None:
    model = Autoencoder()
    quietly(model, level, loss_scale=1.0)
    x = torch.randn(6, 4, requires_grad=True)
    out = model.encoder(x)
    assert out.dtype is F32
    assert torch.equal(out, by_hand(model, x, LEVELS[level]))
    out.sum().backward()
    assert x.grad is not None and x.grad.dtype is F32
    assert model.embedding(torch.arange(5)).dtype is F32
    assert torch.equal(model.encoder[0](x), F.linear(x.to(LEVELS[level]), *model.encoder[0].parameters()).float())


def test_a_training_step_that_calls_parts_trains_as_in_float32() -> None:
    plain, model = Autoencoder(), Autoencoder()
    trainer, optimizer = sgd(plain), sgd(model)
    mpinit.initialize(model, optimizer, "O2")
    for _ in range(10):
        x, target = torch.randn(16, 4), torch.randn(16, 4)
        trainer.zero_grad()
        plain.training_step(x, target).backward()
        trainer.step()
        optimizer.zero_grad()
        with mpinit.scale_loss(model.training_step(x, target), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.allclose(state[name].double(), value.double(), atol=5e-3), name


def test_a_loss_among_the_parts_sees_what_it_is_given() -> None:
    model = quietly(Autoencoder())
    output, target = torch.tensor([1200.0]), torch.tensor([1203.9])
    assert model.loss(output, target).item() == pytest.approx(3.9**2, rel=1e-4)


def test_inside_of_forward_nothing_is_cast_between_parts() -> None:
    model = Autoencoder()
    seen: list[torch.dtype] = []
    for module in (*model.encoder, model.encoder, model.decoder):
        module.register_forward_hook(lambda _, args, output: seen.extend([args[0].dtype, output.dtype]))
    quietly(model, "O2")
    assert model(torch.randn(3, 4)).dtype is F32
    assert set(seen) == {F16}
    seen.clear()
    model.encoder(torch.randn(3, 4))
    assert seen == [F16] * 6 + [F32, F32]


def test_kept_parts_are_called_from_a_forward_and_from_outside() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        x = self.body(x)
        one, other = self.head(x), self.head[1](self.head[0](x))  # the head's parts from outside of the head
        assert one.dtype is other.dtype is x.dtype
        return one - other

    model: Any = Parts(run, body=nn.Linear(4, 4), head=nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    quietly(model, keep_fp32="head", loss_scale=1.0)
    x = torch.randn(3, 4)
    assert model(x).abs().max() < 0.01
    assert model.head(x).dtype is model.head[0](x).dtype is F32
    assert torch.equal(model.head[0](x), F.linear(x, model.head[0].weight, model.head[0].bias))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_part_recomputed_in_backward_computes_what_it_did(where: str, reentrant: bool) -> None:
    def block(model: Any, x: Tensor) -> Tensor:
        return checkpoint(model.block, x, use_reentrant=reentrant) if model.recompute else model.block(x)

    gradients = []
    for recompute in (True, False):
        torch.manual_seed(1)
        parts = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model: Any = Parts(lambda self, x: block(self, self.stem(x)), stem=parts[0], block=parts[1])
        model.recompute = recompute
        quietly(model, loss_scale=1.0)
        x = torch.full((2, 4), 0.3, requires_grad=True)
        out = model(x) if where == "inside" else block(model, x)
        assert out.dtype is F32
        out.square().sum().backward()
        assert x.grad is not None
        gradients.append([x.grad, *(p.grad for p in model.block.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class Timed(nn.Module):
    """An embedding of float32 timesteps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 4)

    def forward(self, t: Tensor) -> Tensor:
        waves = torch.stack([t.sin(), t.cos()], dim=1)
        return self.linear(waves.to(self.linear.weight.dtype))  # type: ignore[no-any-return]


RECOMPUTED: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, Tensor], Tensor]]] = {
    "float32 input": (Timed, lambda x, timesteps: timesteps),
    "float32 module, float32 input": (lambda: nn.LayerNorm(4), lambda x, timesteps: x.float()),
    "float32 module, 16-bit input": (lambda: nn.LayerNorm(4), lambda x, timesteps: x),
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("masters", [True, "model"])
@pytest.mark.parametrize("case", RECOMPUTED)
def test_part_recomputed_in_backward_has_the_same_inputs(case: str, masters: Any, reentrant: bool) -> None:
    make, argument = RECOMPUTED[case]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.part, self.head = nn.Linear(4, 4), make(), nn.Linear(4, 2)

        def forward(self, x: Tensor, timesteps: Tensor, recompute: bool) -> Tensor:
            x = self.stem(x)
            passed = argument(x, timesteps)
            part = checkpoint(self.part, passed, use_reentrant=reentrant) if recompute else self.part(passed)
            seen.append(part.dtype)
            return self.head(torch.tanh(x + part))  # type: ignore[no-any-return]

    gradients, seen = [], list[torch.dtype]()
    for recompute in (True, False):
        torch.manual_seed(1)
        model = Net()
        quietly(model, "O5", keep_inputs="timesteps", keep_fp32=nn.LayerNorm, master_weights=masters)
        # torch recomputes with use_reentrant=True only if an input requires a gradient.
        timesteps = torch.tensor([998.39, 997.2, 3.0]).requires_grad_()
        model.part.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        model(torch.full((3, 4), 0.3), timesteps, recompute).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert set(seen) == {BF16}
    assert len(gradients[0]) == len(gradients[1])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_threads_do_not_see_one_anothers_forwards() -> None:
    def spawn(self: Any, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
        return in_thread(lambda: self.part(torch.ones(1, 2)).dtype), self.part(x).dtype

    assert quietly(Parts(spawn, part=nn.Linear(2, 2)))(torch.ones(1, 2)) == (F32, F16)


def test_exception_in_forward_restores_state() -> None:
    def fail(self: Any, x: Tensor) -> Tensor:
        raise KeyError

    model = quietly(Parts(fail, part=nn.Linear(2, 2)))
    with pytest.raises(KeyError):
        model(torch.ones(1, 2))
    assert model.part(torch.ones(1, 2)).dtype is F32


def test_a_model_that_calls_itself_stays_in_its_type() -> None:
    def climb(self: Any, x: Tensor, depth: int = 2) -> Tensor:
        return self.linear(self(x, depth - 1)) if depth else x

    model = quietly(Parts(climb, linear=nn.Linear(2, 2)))
    assert model(torch.ones(1, 2)).dtype is F32


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_in_one_graph(backend: str) -> None:
    model = quietly(Autoencoder(), entry_points="forward_features").eval()
    x = torch.randn(3, 4)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "the model": model,
        "a part": model.encoder,
        "a function": lambda value: model.decoder(model.encoder(value)),
        "a method": model.forward_features,
    }
    for name, call in calls.items():
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend=backend)
        assert torch.equal(compiled(x), call(x)), name
    model.encoder.compile(fullgraph=True, backend=backend)
    assert torch.equal(model.encoder(x), by_hand(model, x, F16))
    assert model(x).dtype is F32


def test_graph_break_inside_forward_keeps_the_boundary() -> None:
    seen: list[torch.dtype] = []

    def run(self: Any, x: Tensor) -> Tensor:
        x = self.one(x)
        torch._dynamo.graph_break()
        x = self.two(x)
        torch._dynamo.graph_break()
        seen.append(x.dtype)
        return x

    model = quietly(Parts(run, one=nn.Linear(2, 2), two=nn.Linear(2, 2)))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert set(seen) == {F16}
    assert model.one(torch.ones(1, 2)).dtype is F32


def test_symbolic_trace_equals_model_without_casts_between_parts() -> None:
    model = quietly(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)))
    traced = torch.fx.symbolic_trace(model)
    assert "to" not in {node.target for node in traced.graph.nodes}
    x = torch.randn(3, 2)
    assert torch.equal(traced(x), model(x))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Autoencoder()
        self.offset = nn.Parameter(torch.ones(4))

    @staticmethod
    def double(x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(x)

    def classify(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """What forward does."""
        assert x.dtype is self.offset.dtype
        return self.backbone(x) + (self.offset if shift is None else shift)

    def embed(self, x: Tensor) -> dict[str, Tensor]:
        assert x.dtype is self.offset.dtype
        return {"embedded": self.backbone.encoder(x) + self.offset}


@pytest.mark.parametrize("level", [*LEVELS, "O0"])
def test_entry_points_have_their_inputs_and_outputs_cast(level: str) -> None:
    model = Classifier()
    quietly(model, level, entry_points=["embed", "backbone.forward_features"])
    dtype = LEVELS.get(level, F32)
    x = torch.randn(3, 4)
    assert model(x).dtype is F32
    assert torch.equal(model.embed(x)["embedded"], (by_hand(model.backbone, x, dtype).to(dtype) + model.offset).float())
    assert torch.equal(model.backbone.forward_features(x), by_hand(model.backbone, x, dtype))
    assert model.backbone.forward_features(x, scale=2.0).dtype is F32
    mpinit.undo(model)
    assert not {"embed", "forward"} & set(vars(model)) and "forward_features" not in vars(model.backbone)


def test_an_entry_point_called_by_forward_casts_nothing_more() -> None:
    model = quietly(Classifier(), entry_points="classify")
    seen: list[torch.dtype] = []
    model.backbone.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    assert model(torch.randn(3, 4)).dtype is model.classify(torch.randn(3, 4)).dtype is F32
    assert set(seen) == {F16}
    assert model.classify.__wrapped__.__doc__ == "What forward does."


def test_casts_are_on_in_entry_points_at_o1_in_scope_of_model() -> None:
    model = quietly(Classifier(), "O1", patch_torch_functions="model", entry_points="embed")
    seen: list[torch.dtype] = []
    model.backbone.encoder.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    assert model.embed(torch.randn(1, 4))["embedded"].dtype is F32
    assert seen == [F16]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("embd", "'embed'"),
        ("forward_features", "'backbone.forward_features'"),
        ("double", "not a method of Classifier"),
        ("backbone", "not a method of Classifier"),
    ],
)
def test_unknown_entry_point_is_refused_before_changes(name: str, near: str) -> None:
    model = Classifier()
    with pytest.raises(ValueError) as caught:
        quietly(model, entry_points=["embed", name])
    assert repr(name) in str(caught.value) and near in str(caught.value)
    assert "embed" not in vars(model) and model.offset.dtype is F32


@pytest.mark.parametrize("entry", [3, "a b", "", [len], ".", "a..b"])
def test_entry_point_that_is_no_name_is_refused(entry: Any) -> None:
    with pytest.raises(ValueError, match="entry_points"):
        quietly(Classifier(), entry_points=entry)
