"""Weights that are their own masters, inside of forwards: what code there sees, and casts made natively or by torch.

Below the public face: the casts of a forward are tried alone, and their kernels counted.
"""

import threading
import weakref
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import backward
from models import CASES, Parts, equal_tensors
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from weights_in_forward import BF16, F32, is_float32_outside, start

import mpinit
from mpinit.model import forward_weights


def equals_full_masters(build: Callable[[], nn.Module], x: Tensor, **more: Any) -> None:
    """Three steps, with accumulation, end with the bits of ``master_weights=True``."""
    states = []
    for kind in (True, "model"):
        torch.manual_seed(0)
        model = build()
        # Gradients of several uses of a weight add up in float32.
        optimizer = start(model, master_weights=kind, grad_dtype=F32, **more)
        for index in range(6):
            output = model(x)
            loss = (output[0] if isinstance(output, tuple) else output).float().pow(2).mean()
            backward(loss, optimizer)
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        if kind == "model":
            is_float32_outside(model)
        mpinit.undo(model)
    assert equal_tensors(*states)


def tied() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        assert self.embedding.weight is self.head.weight
        return self.head(self.embedding(x.argmax(-1)))

    model: Any = Parts(run, embedding=nn.Embedding(8, 4), head=nn.Linear(4, 8, bias=False))
    model.head.weight = model.embedding.weight
    return model


def run_lists(self: Any, x: Tensor) -> Tensor:
    for weight in self.some:
        x = x @ weight
    assert next(self.parameters()).dtype is BF16
    return x @ self.named["a"]


def lists() -> nn.Module:
    weights = [torch.randn(4, 4) for _ in range(3)]
    return Parts(run_lists, some=nn.ParameterList(weights[:2]), named=nn.ParameterDict({"a": weights[2]}))


class Checkpointed(nn.Module):
    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__()
        self.how, self.reentrant = how, reentrant
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh())

    def method(self, x: Tensor) -> Tensor:
        return self.block[1](self.block[0](x))

    def raw(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        inner = {"module": self.block, "method": self.method, "raw": self.raw}[self.how]
        result: Tensor = checkpoint(inner, self.first(x), use_reentrant=self.reentrant)
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": tied,
    "unrolled": lambda: Parts(lambda m, x: reduce(lambda y, _: m.cell(y).tanh(), range(4), x), cell=nn.Linear(4, 4)),
    "lists": lists,
    "lstm": lambda: nn.LSTM(4, 4, 2, batch_first=True),
    "attention": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4))),
    "kept": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)),
    "batchnorm": lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.BatchNorm1d(8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_bits_of_full_masters(name: str) -> None:
    more = {"kept": {"keep_fp32": [nn.LayerNorm]}, "batchnorm": {"keep_batchnorm_fp32": False}}.get(name, {})
    equals_full_masters(MODELS[name], torch.randn(3, 2, 4), **more)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", ["module", "method", "raw"])
def test_recomputed_activations_have_the_bits_of_full_masters(how: str, reentrant: bool) -> None:
    # What is recomputed is called from outside: a method that reads weights by itself has to be named.
    equals_full_masters(lambda: Checkpointed(how, reentrant), torch.randn(3, 4), entry_points=["raw"])


class Recomputed(torch.autograd.Function):
    """A checkpoint of public diffusion models: it is passed parameters, and asks autograd for their gradients."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], count: int, *args: Any) -> Tensor:
        ctx.run, ctx.inputs, ctx.weights = run, args[:count], args[count:]
        with torch.no_grad():
            return run(*args[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.enable_grad():
            output = ctx.run(*[x.view_as(x) for x in inputs])
        found = torch.autograd.grad(output, [*inputs, *ctx.weights], gradients, allow_unused=True)
        return None, None, *found


class Residual(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 8))

    def run(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.body(x)
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        if not self.recomputes:
            return self.run(x)
        recomputed: Tensor = Recomputed.apply(self.run, 1, x, *self.parameters())  # type: ignore[no-untyped-call]
        return recomputed


def residual(recomputes: bool) -> nn.Module:
    blocks = [Residual(recomputes) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 1))


@pytest.mark.parametrize("more", [{}, {"grad_dtype": F32}], ids=["", "float32 gradients"])
def test_weights_of_a_function_that_recomputes_are_all_trained(more: Any) -> None:
    """Two forwards of a step share the casts, and steps, by a fused kernel too, make them anew."""
    states = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = residual(recomputes)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        mpinit.initialize(model, optimizer, "O5", master_weights="model", **more)
        for index in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
            loss = model(x).square().mean() + model(x + 1).square().mean()
            backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        assert all(not torch.equal(value, before[name]) for name, value in states[-1].items())
    torch.testing.assert_close(states[1], states[0], rtol=0.01, atol=0.001)


class Adjoint(torch.autograd.Function):
    """Euler steps whose backward pass integrates back, with the weights as saved tensors, as torchdiffeq does."""

    @staticmethod
    def forward(ctx: Any, field: Any, state: Tensor, *weights: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(3):
                state = state + 0.1 * field(state)
        ctx.field = field
        ctx.save_for_backward(state, *weights)
        return state

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state, *weights = ctx.saved_tensors
        (adjoint,) = gradients
        sums = [torch.zeros_like(weight) for weight in weights]
        for _ in range(3):
            with torch.enable_grad():
                state = state.detach().requires_grad_()
                change = 0.1 * ctx.field(state)
                found = torch.autograd.grad(change, [state, *weights], adjoint, allow_unused=True)
            state = state - change.detach()
            adjoint = adjoint + found[0]
            sums = [total + (0 if one is None else one) for total, one in zip(sums, found[1:], strict=True)]
        return None, adjoint, *sums


@pytest.mark.parametrize("inside", [True, False], ids=["in a forward", "outside"])
def test_weights_of_an_adjoint_get_the_gradients_of_float32(inside: bool) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        state: Tensor = Adjoint.apply(self.field, x, *self.field.parameters())  # type: ignore[no-untyped-call]
        return state

    gradients = []
    for level in (None, "O5"):
        torch.manual_seed(0)
        model = Parts(run, field=nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)))
        if level:
            start(model)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        output = model(x) if inside else run(model, x)
        output.square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, expected in zip(gradients[1], gradients[0], strict=True):
        assert ours is not None and (ours - expected).norm() < 0.03 * expected.norm()


def test_a_weight_has_one_cast_until_it_changes() -> None:
    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight)
            return super().forward(x)

    seen: list[Tensor] = []
    model = nn.Sequential(Seen(4, 4))
    optimizer = start(model)
    x = torch.ones(2, 4)
    with torch.no_grad():
        model(x)
    backward(model(x).sum() + model[0](x).sum(), optimizer)
    assert all(each is seen[0] for each in seen) and type(seen[0]) is nn.Parameter
    optimizer.step()
    model(x)
    assert seen[-1] is not seen[0] and torch.equal(seen[-1], model[0].weight.to(BF16))
    model[0].requires_grad_(False)
    model(x)
    assert not seen[-1].requires_grad


def test_backward_pass_of_one_output_leaves_other_weights_alone() -> None:
    model: Any = Parts(lambda self, x: (self.a(x), self.b(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.b.bias.requires_grad_(False)
    start(model)
    first, second = model(torch.ones(2, 4))
    first.sum().backward()
    assert torch.equal(model.a.weight.grad, torch.full((4, 4), 2.0))
    assert model.b.weight.grad is None
    (alone,) = torch.autograd.grad(second.sum(), [model.b.weight])
    assert torch.equal(alone, torch.full((4, 4), 2.0))
    assert model.b.bias.grad is None


def test_a_parameter_that_is_named_stays_float32() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        kinds.append((self.scale.dtype, self.layer.weight.dtype))
        return self.layer(x * self.scale.to(x.dtype))

    kinds: list[Any] = []
    model = Parts(run, scale=nn.Parameter(torch.ones(4)), layer=nn.Linear(4, 4))
    start(model, keep_fp32=["scale"])
    model(torch.ones(1, 4)).sum().backward()
    torch._dynamo.reset()
    torch.compile(model, backend="eager")(torch.ones(1, 4))
    assert kinds[0] == (F32, BF16) and set(kinds) == {kinds[0]}
    assert model.scale.grad is not None


def test_a_step_in_a_forward_is_refused() -> None:
    def run(self: Any, x: Tensor) -> None:
        self.net(x).sum().backward()
        optimizer.step()

    model = Parts(run, net=nn.Linear(4, 1, bias=False))
    optimizer = start(model, loss_scale=1.0)
    before = model.net.weight.clone()
    with pytest.raises(RuntimeError, match=r"step\(\) was called inside of a forward.*master_weights=True"):
        model(torch.ones(1, 4))
    assert torch.equal(model.net.weight, before)
    is_float32_outside(model)
    optimizer.step()
    assert not torch.equal(model.net.weight, before)


def test_a_parameter_that_is_replaced_is_freed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mpinit.initialize(model, opt_level="O5", master_weights="model")
    model(torch.ones(1, 4))
    old = weakref.ref(model[0].weight)
    model[0] = nn.Linear(4, 4)
    model(torch.ones(1, 4))
    assert old() is None


def test_a_state_dict_saved_in_a_forward_is_not_rounded() -> None:
    class Saves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.saved = self.state_dict()
            return super().forward(x)

    model = Saves(4, 4)
    start(model)
    model(torch.ones(1, 4))
    assert equal_tensors(model.saved, dict(model.state_dict()))


@pytest.mark.parametrize("moment", ["ForwardWeights._modules_to_enter", "WeightCasts.of"])
def test_checkpoint_saved_by_signal_handler_while_forward_begins(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs handlers between any two lines: one that saves neither waits for its own thread nor fails."""
    model = nn.Linear(4, 4)
    model.register_buffer("noise", torch.full((3,), 0.1))
    around: Any = Parts(lambda self, x: model(self.first(x)), first=nn.Linear(4, 4))
    start(model)
    start(around)
    before, saved = dict(model.state_dict()), []
    *path, name = moment.split(".")
    where = reduce(getattr, path, forward_weights)
    begin = getattr(where, name)

    def interrupted(*args: Any) -> Any:
        saved.append(dict(model.state_dict()))
        return begin(*args)

    monkeypatch.setattr(where, name, interrupted)
    thread = threading.Thread(target=around, args=(torch.ones(2, 4),), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits for itself"
    assert len(saved) == 2 and all(equal_tensors(state, before) for state in saved)


def test_compiles_as_one_graph() -> None:
    case = CASES["transformer"]
    model = case.build()
    start(model)
    (x, y) = case.batches(1)[0]
    expected = torch.autograd.grad(case.loss(model(x), y), list(model.parameters()))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(case.loss(compiled(x), y), list(model.parameters()))
    assert all(map(torch.equal, actual, expected))
    is_float32_outside(model)


# torch hides it, but not where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_model_that_is_compiled_before_initialize_trains() -> None:
    x = torch.linspace(-1, 1, 8).view(2, 4)
    trained = []
    for compiles in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        run = torch.compile(model, backend="eager") if compiles else model
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        mpinit.initialize(run, optimizer, "O5", master_weights="model")
        for _ in range(2):
            optimizer.zero_grad()
            run(x).square().sum().backward()
            optimizer.step()
        trained.append([weight.detach().clone() for weight in model.parameters()])
    assert all(map(torch.equal, *trained))


# torch hides the first, but not where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Dynamo does not know")
@pytest.mark.parametrize("breaks", ["explicitly", "by an RNN"])
def test_a_compiled_forward_may_break_the_graph(breaks: str) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        if breaks == "explicitly":
            torch._dynamo.graph_break()
        return self.rnn(x)[0].sum(-1)  # type: ignore[no-any-return]

    model = Parts(run, first=nn.Linear(4, 4), rnn=nn.GRU(4, 4))
    start(model)
    torch._dynamo.reset()
    results = []
    for forward in (model, torch.compile(model, backend="eager")):
        output = forward(torch.ones(2, 4))
        results.append([output, *torch.autograd.grad(output.sum(), list(model.parameters()))])
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=0.01)
    is_float32_outside(model)


class Momentum(nn.Module):
    """A network, and a frozen one that each forward moves towards it."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.average = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for new, old in zip(self.trained.parameters(), self.average.parameters(), strict=True):
                old.mul_(0.5).add_(new, alpha=0.5)
            self.trained.weight[0].clamp_(-0.1, 0.1)
        return self.trained(x) - 0.5 * self.average(x)  # type: ignore[no-any-return]


REFUSED = r"'weight' of shape \(4, 4\) in Momentum was written to.*keep_fp32"


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Dynamo does not know")
@pytest.mark.parametrize("how", ["eager", "compile", "fullgraph", "strict export", "export"])
def test_writes_of_a_forward_to_its_weights_are_refused(how: str) -> None:
    torch._dynamo.reset()
    model, x = Momentum(), torch.ones(2, 4)
    mpinit.initialize(model, opt_level="O5", master_weights="model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSED):
            if how == "eager":
                model(x)
            elif "export" in how:
                torch.export.export(model, (x,), strict=how == "strict export")
            else:
                torch.compile(model, backend="eager", fullgraph=how == "fullgraph")(x)
        is_float32_outside(model)
    assert equal_tensors(before, dict(model.state_dict()))


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "data": lambda self: self.weight.data.mul_(2),
    "data =": lambda self: setattr(self.weight, "data", self.weight.data * 2),
    "detached": lambda self: self.weight.detach().mul_(2),
    "replaced": lambda self: setattr(self, "weight", nn.Parameter(torch.ones_like(self.weight))),
}


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
def test_ways_to_write_in_a_forward_are_refused(write: Callable[[Any], Any]) -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                write(self)
            return super().forward(x)

    model = Writes(4, 4)
    start(model)
    weight = model.weight
    expected = model.eval()(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match="'weight' of shape"):
        model.train()(torch.ones(1, 4))
    assert model.weight is weight
    assert torch.equal(model.eval()(torch.ones(1, 4)), expected)


def test_modules_that_join_later_are_cast_as_well() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    start(model)
    parametrizations.weight_norm(model[0])
    model[1] = nn.Linear(4, 2)
    assert model(torch.ones(1, 4)).shape == (1, 2)
    is_float32_outside(model)


@pytest.mark.parametrize("change", ["parameter", "data", "type", "module", "deeper", "gone", "tied"])
def test_changes_between_two_forwards_are_found(change: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    start(model)
    for _ in range(2):
        model(torch.ones(1, 4))
        match change:
            case "parameter":
                model[0].weight = nn.Parameter(torch.full((4, 4), 0.5))
            case "data":
                model[0].weight.data = torch.full((4, 4), 0.5)
            case "type":
                model[0].weight.data = model[0].weight.data.to(F32 if model[0].weight.dtype is BF16 else BF16)
            case "module":
                model[1][0] = nn.Linear(4, 4)
            case "deeper":
                model[1].append(nn.Linear(4, 4))
            case "gone":
                del model[0]
            case _:
                model[0].weight = model[1][0].weight
        output = model(torch.ones(1, 4))
        expected = torch.ones(1, 4, dtype=BF16)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                expected = F.linear(expected, module.weight.to(BF16), module.bias.to(BF16))
            elif isinstance(module, nn.ReLU):
                expected = F.relu(expected)
        assert torch.equal(output, expected.float())
    is_float32_outside(model)


def test_a_renamed_parameter_is_cast_there() -> None:
    model = nn.PReLU()
    start(model)
    model(torch.ones(1, 4))
    model.other = model._parameters.pop("weight")
    with pytest.raises(AttributeError, match="weight"):
        model(torch.ones(1, 4))
    assert list(model._parameters) == ["other"]
    is_float32_outside(model)


def test_what_comes_in_16_bit_is_trained_in_float32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(BF16)
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4, dtype=BF16)).sum().backward()
    optimizer.step()
    mpinit.initialize(model, optimizer, "O5", master_weights="model")
    assert [p.dtype for p in model.parameters()] == [BF16, BF16, F32, F32], "frozen weights are left as they are"
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {F32}
    assert all(p.grad is not None and p.grad.dtype is F32 for p in model[1].parameters())
    model[0].requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    mpinit.undo(model)
    is_float32_outside(model)


def test_refusals_of_masters_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    for level in ("O0", "O1"):
        with pytest.raises(ValueError, match=r"master_weights=.model. contradicts"):
            mpinit.initialize(model, opt_level=level, master_weights="model")
    start(model)
    assert "master_weights = model" in mpinit.describe(model)
    with pytest.raises(RuntimeError, match=r"mpinit\.undo"):
        model.half()


def casts_in_backward(layers: int) -> int:
    """Count the casts of a backward pass, of which one may be of many tensors."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    start(model)
    loss = model(torch.ones(2, 4)).sum()
    found = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.overloadpacket.__name__ in ("_to_copy", "copy_", "_foreach_copy_"):
                found.append(function)
            return function(*args, **kwargs or {})

    with Count():
        loss.backward()
    assert all(parameter.grad.dtype is F32 for parameter in model.parameters())
    return len(found)


def test_gradients_of_all_weights_are_cast_in_one_operation() -> None:
    assert casts_in_backward(2) == casts_in_backward(20)


@pytest.mark.parametrize("grad_dtype", [None, F32])
def test_two_uses_of_a_weight_add_up_in_the_dtype_asked_for(grad_dtype: Any) -> None:
    model: Any = Parts(lambda self, x: self.a(x * 256) + self.a(x), a=nn.Linear(1, 1, bias=False))
    start(model, grad_dtype=grad_dtype)
    model(torch.ones(1, 1)).sum().backward()
    assert model.a.weight.grad.dtype is F32
    assert model.a.weight.grad.item() == (256 if grad_dtype is None else 257)


def test_gradient_penalty_and_sparse_gradients_train() -> None:
    """The second derivative of x * w**2 is 2 * x * w; an embedding's gradient is sparse."""
    model: Any = Parts(lambda self, x: self.a(self.a(x)), a=nn.Linear(1, 1, bias=False))
    start(model)
    (first,) = torch.autograd.grad(model(torch.full((1, 1), 3.0)).sum(), [model.a.weight], create_graph=True)
    first.sum().backward()
    assert model.a.weight.grad.item() == 6.0
    table: Any = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    start(table)
    table(torch.tensor([1, 1])).sum().backward()
    assert table[0].weight.grad.is_sparse and table[0].weight.grad.dtype is F32
    assert table[0].weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]
