"""Weights that are their own masters, inside of forwards: what code there sees, and casts made natively or by torch.

Below the public face: the casts of a forward are tried alone, and their kernels counted.
"""

import threading
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import backward
from models import CASES, Parts, equal_tensors
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from weights_in_forward import BF16, F32, is_float32_outside, start

import mpinit
from mpinit.model import forward_weights
from mpinit.torch_internals import float32_gradients
from mpinit.torch_internals.float32_gradients import casts_with_float32_gradients


def equals_full_masters(build: Callable[[], nn.Module], x: Tensor, **more: Any) -> None:
    """Three steps, with accumulation, end with the bits of ``master_weights=True``."""
    states = []
    for kind in (True, "model"):
        torch.manual_seed(0)
        model = build()
        optimizer = start(model, master_weights=kind, **more)
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


class Counted(TorchDispatchMode):
    """Counts the operations that compute: no views, no allocations, no numbers read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        self.count += not func.is_view and name not in ("empty_like", "detach", "_local_scalar_dense")
        return func(*args, **(kwargs or {}))


def kernels(**more: Any) -> int:
    model = nn.Sequential(*[m for _ in range(20) for m in (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())])
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    mpinit.initialize(model, optimizer, "O5", **more)

    def iterate() -> None:
        backward(model(torch.ones(2, 8)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    iterate()
    with Counted() as counted:
        iterate()
    mpinit.undo(model)
    return counted.count


def test_all_weights_are_cast_by_one_kernel() -> None:
    assert kernels(master_weights="model") <= kernels() + 2


def test_a_step_inside_a_forward_is_seen_by_what_follows() -> None:
    losses: list[float] = []

    def run(self: Any, x: Tensor) -> None:
        for _ in range(3):
            loss = self.net(x).sum()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model = Parts(run, net=nn.Linear(4, 1, bias=False))
    optimizer = start(model, loss_scale=1.0)
    model(torch.ones(1, 4))
    torch.testing.assert_close(losses, [losses[0], losses[0] - 0.4, losses[0] - 0.8], atol=0.02, rtol=0)


def test_a_state_dict_saved_in_a_forward_is_not_rounded() -> None:
    class Saves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.saved = self.state_dict()
            return super().forward(x)

    model = Saves(4, 4)
    start(model)
    model(torch.ones(1, 4))
    assert equal_tensors(model.saved, dict(model.state_dict()))


@pytest.mark.parametrize("moment", ["ForwardWeights._new_casts", "_casts"])
def test_a_checkpoint_saved_by_a_signal_handler_while_a_forward_begins(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Dynamo does not know")
def test_writes_of_a_compiled_forward_to_its_weights_count() -> None:
    states = []
    for compiles in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Momentum()
        optimizer = torch.optim.SGD(model.trained.parameters(), lr=0.3)
        mpinit.initialize(model, optimizer, "O5", master_weights="model")
        before = model.average.weight.clone()
        forward = torch.compile(model, backend="eager") if compiles else model
        for _ in range(4):
            optimizer.zero_grad()
            forward(torch.ones(2, 4)).pow(2).mean().backward()
            optimizer.step()
        assert (model.average.weight - before).norm() > 0.1
        states.append(dict(model.state_dict()))
    torch.testing.assert_close(states[1], states[0], rtol=0.02, atol=0.005)


@pytest.mark.parametrize("strict", [None, True, False], ids=["compile", "strict export", "export"])
def test_writes_to_weights_are_refused_where_one_graph_is_wanted(strict: bool | None) -> None:
    torch._dynamo.reset()
    model, x = Momentum(), torch.ones(2, 4)
    mpinit.initialize(model, opt_level="O5", master_weights="model")
    with pytest.raises(RuntimeError, match=r"'weight' of shape \(4, 4\) in Momentum is written to in place"):
        if strict is None:
            torch.compile(model, backend="eager", fullgraph=True)(x)
        else:
            torch.export.export(model, (x,), strict=strict)


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


def test_casts_are_parameters_whose_data_is_watched_for_no_longer_than_a_forward() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((type(self.weight), self.weight.dtype, "data" in vars(nn.Parameter)))
            if len(seen) > 1:
                raise ValueError("mine")
            return super().forward(x)

    seen: list[Any] = []
    model = Looks(4, 4)
    start(model)
    model(torch.ones(1, 4))
    with pytest.raises(ValueError, match="mine"):
        model(torch.ones(1, 4))
    assert seen == [(nn.Parameter, BF16, True)] * 2 and "data" not in vars(nn.Parameter)
    is_float32_outside(model)


def test_weights_computed_by_hooks_of_the_model_itself() -> None:
    model = nn.Linear(4, 4)
    prune.random_unstructured(model, "weight", 0.5)
    start(model)
    assert model(torch.ones(1, 4)).dtype is F32
    assert model.weight.dtype is F32


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


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_refusals_of_masters_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    for level in ("O0", "O1"):
        with pytest.raises(ValueError, match=r"master_weights=.model. contradicts"):
            mpinit.initialize(model, opt_level=level, master_weights="model")
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"into a torch\.jit\.ScriptModule.*=True"):
        start(scripted)
    start(scripted, keep_fp32=["1"])
    scripted(torch.ones(1, 4))
    start(model)
    assert "master_weights = model" in mpinit.describe(model)
    with pytest.raises(RuntimeError, match=r"mpinit\.undo"):
        model.half()
    with pytest.raises(RuntimeError, match=r"torch\.export"):
        torch.jit.script(model)


@pytest.fixture
def casts() -> Any:
    return casts_with_float32_gradients


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    dense = [torch.randn(8, 8).t(), torch.randn(3, 1).expand(3, 4), torch.randn(()), torch.randn(0, 3), torch.randn(5)]
    return [nn.Parameter(each, requires_grad=index != 4) for index, each in enumerate(dense)]


def test_casts_equal_tensor_to(casts: Any) -> None:
    given = weights()
    for cast, weight in zip(casts(given, BF16), given, strict=True):
        expected = weight.to(BF16)
        assert cast.dtype is BF16 and torch.equal(cast, expected)
        assert cast.stride() == expected.stride()
        assert cast.requires_grad == weight.requires_grad
        assert cast.data_ptr() == 0 or cast.data_ptr() != weight.data_ptr()


def test_gradients_of_several_uses_add_up_in_float32(casts: Any) -> None:
    weight = nn.Parameter(torch.tensor([256.0]))
    (cast,) = casts([weight], BF16)
    (cast * 256 + cast).backward()
    assert weight.grad is not None and weight.grad.dtype is F32 and weight.grad.item() == 257


def test_a_weight_without_a_gradient_has_none_and_others_get_theirs(casts: Any) -> None:
    given = weights()
    made = casts(given, BF16)
    (made[0].sum() * 2 + made[2]).backward()
    assert given[1].grad is None and given[4].grad is None
    assert given[0].grad is not None and given[0].grad.eq(2).all() and given[2].grad == 1


def test_second_derivatives(casts: Any) -> None:
    weight = nn.Parameter(torch.tensor([3.0]))
    (cast,) = casts([weight], BF16)
    (first,) = torch.autograd.grad(cast.pow(3).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    assert (first.item(), second.item()) == (27, 18)


def test_hooks_of_the_weight_see_the_whole_gradient(casts: Any) -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []
    weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    (cast,) = casts([weight], BF16)
    (cast.sum() + cast.sum()).backward()
    assert [each.tolist() for each in seen] == [[2, 2], [4, 4]]


def test_each_node_stands_for_so_many_numbers(casts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_gradients, "_NUMBERS_AT_A_TIME", 10)
    made = casts([nn.Parameter(torch.ones(4)) for _ in range(5)], BF16)
    nodes = [made[0].grad_fn, made[2].grad_fn, made[4].grad_fn]
    assert [cast.grad_fn for cast in made] == [nodes[0], nodes[0], nodes[1], nodes[1], nodes[2]]
    assert len(set(nodes)) == 3


class Other(nn.Parameter):
    """A class that has casts of its own."""


def test_what_is_not_a_plain_parameter_is_left_to_its_own_cast(casts: Any) -> None:
    computed = nn.Parameter(torch.ones(2)) * 2
    computed.__class__ = nn.Parameter
    with torch.inference_mode():
        without_versions = nn.Parameter(torch.ones(2))
    sparse = nn.Parameter(torch.eye(2).to_sparse())
    plain = nn.Parameter(torch.ones(3))
    made = casts([Other(torch.ones(2)), computed, plain, without_versions, sparse], BF16)
    assert [cast is None for cast in made] == [True, True, False, True, True]
    assert made[2].grad_fn is not None


def test_without_gradients_nothing_is_recorded(casts: Any) -> None:
    with torch.no_grad():
        assert not any(cast.requires_grad for cast in casts(weights(), BF16))
    assert casts([], BF16) == []


@pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning")
def test_a_backward_pass_that_is_compiled(casts: Any) -> None:
    weight = nn.Parameter(torch.tensor([256.0]))
    (cast,) = casts([weight], BF16)
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        (cast * 256 + cast).backward()
    assert weight.grad is not None and weight.grad.item() == 257
