"""Calls from outside of the model's forward to what is below it, and the hook before them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from autoencoder import F16, F32, LEVELS, Autoencoder, by_hand
from models import quietly, sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import mpinit
from mpinit.model.forward import patch_forwards
from mpinit.model.selection import select
from mpinit.plan import make_plan
from mpinit.settings.opt_levels import OPT_LEVELS


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
    mpinit.initialize(model, optimizer, "O2", verbosity=0)
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


def test_reading_a_parametrized_weight_casts_nothing() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    quietly(model)
    assert model[0].weight.dtype is F16
    assert model(torch.ones(1, 4)).dtype is F32


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        one, other = self.head(x), self.head[1](self.head[0](x))  # the head's parts from outside of the head
        assert one.dtype is other.dtype is x.dtype
        return one - other


def test_parts_of_what_is_kept_in_float32_can_be_called_from_a_16_bit_forward_and_from_outside() -> None:
    model = Kept()
    quietly(model, keep_fp32="head", loss_scale=1.0)
    x = torch.randn(3, 4)
    assert model(x).abs().max() < 0.01
    assert model.head(x).dtype is model.head[0](x).dtype is F32
    assert torch.equal(model.head[0](x), F.linear(x, model.head[0].weight, model.head[0].bias))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_part_recomputed_in_the_backward_pass_computes_what_it_did(where: str, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.stem = nn.Linear(4, 4)
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            self.recompute = True

        def run(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant) if self.recompute else self.block(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.run(self.stem(x))

    gradients = []
    for recompute in (True, False):
        model = quietly(Checkpointed(), loss_scale=1.0)
        model.recompute = recompute
        x = torch.full((2, 4), 0.3, requires_grad=True)
        out = model(x) if where == "inside" else model.run(x)
        assert out.dtype is F32
        out.square().sum().backward()
        assert x.grad is not None
        gradients.append([x.grad, *(p.grad for p in model.block.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_threads_do_not_see_one_anothers_forwards() -> None:
    seen: dict[str, torch.dtype] = {}

    class Spawning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: seen.update(other=self.part(torch.ones(1, 2)).dtype))
            thread.start()
            thread.join()
            out = self.part(x)
            seen["own"] = out.dtype
            return out

    quietly(Spawning())(torch.ones(1, 2))
    assert seen == {"other": F32, "own": F16}


def test_an_exception_in_forward_leaves_no_trace() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            raise KeyError

    model = quietly(Failing())
    with pytest.raises(KeyError):
        model(torch.ones(1, 2))
    assert model.part(torch.ones(1, 2)).dtype is F32


def test_a_model_that_calls_itself_stays_in_its_type() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            return self.linear(self(x, depth - 1)) if depth else x

    model = quietly(Tree())
    assert model(torch.ones(1, 2)).dtype is F32


def test_a_model_and_a_part_of_it_in_one_call() -> None:
    model = Autoencoder()
    mpinit.initialize([model, model.encoder], sgd(model), "O2", verbosity=0)
    x = torch.randn(3, 4)
    assert model(x).dtype is model.encoder(x).dtype is F32


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


def test_a_graph_break_inside_does_not_make_a_part_believe_it_is_outside() -> None:
    seen: list[torch.dtype] = []

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            torch._dynamo.graph_break()
            x = self.two(x)
            torch._dynamo.graph_break()
            seen.append(x.dtype)
            return x

    model = quietly(Broken())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert set(seen) == {F16}
    assert model.one(torch.ones(1, 2)).dtype is F32


def test_undo_leaves_nothing_on_any_module() -> None:
    model = Autoencoder()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    quietly(model, keep_fp32="decoder", entry_points="forward_features")
    mpinit.undo(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == {k: set(v) for k, v in before.items()}
    x = torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        model.encoder(x)  # nothing is cast any more


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_where_weights_stay_float32_parts_are_left_alone(level: str) -> None:
    model = quietly(Autoencoder(), level)
    assert all("forward" not in vars(module) for module in model.modules() if module is not model)


def test_symbolic_tracing_records_no_casts_between_parts_and_the_trace_computes_what_the_model_does() -> None:
    model = quietly(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)))
    traced = torch.fx.symbolic_trace(model)
    assert "to" not in {node.target for node in traced.graph.nodes}
    x = torch.randn(3, 2)
    assert torch.equal(traced(x), model(x))


# -- the hook ---------------------------------------------------------------------------------------------------------


def test_the_hook_comes_before_every_outermost_call_and_only_there() -> None:
    model = Autoencoder()
    props = OPT_LEVELS["O2"].model_copy(update={"entry_points": ("forward_features",), "keep_fp32": ("decoder",)})
    plan = make_plan(props)
    calls: list[int] = []
    selection = select([model], plan)
    undo = patch_forwards(selection, plan, None, before_forward=lambda: calls.append(1)).undo
    for tensor, dtype in selection.targets.items():
        tensor.data = tensor.data.to(dtype)
    x = torch.randn(3, 4)
    for call in (model, model.encoder, model.encoder[0], model.forward_features, model.decoder):
        calls.clear()
        call(x)
        assert len(calls) == 1
    calls.clear()
    model._replicate_for_data_parallel()(x)
    copy.deepcopy(model)(x)
    assert not calls
    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, backend="eager")
    fast(x)
    assert not calls, "nothing of the kind is compiled"
    kept = model.forward
    undo()
    model.float()
    kept(x)
    assert not calls


def test_forwards_compute_in_float32_for_a_while() -> None:
    model = Autoencoder()
    plain = copy.deepcopy(model)
    props = OPT_LEVELS["O5"].model_copy(update={"entry_points": ("forward_features",), "keep_fp32": ("decoder",)})
    plan = make_plan(props)
    selection = select([model], plan)
    forwards = patch_forwards(selection, plan, None)
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    with pytest.raises(KeyError), forwards.in_float32():
        with forwards.in_float32():
            assert torch.equal(model(x), plain(x.float()))
        for call in ("encoder", "decoder", "forward_features"):
            assert torch.equal(getattr(model, call)(x), getattr(plain, call)(x.float()))
        raise KeyError
    for tensor, dtype in selection.targets.items():
        tensor.data = tensor.data.to(dtype)
    assert model.encoder[0].weight.dtype is torch.bfloat16
    model(x)
    forwards.undo()
