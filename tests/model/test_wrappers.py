"""Uses of a patched forward: wrap it, replace it, export it, trace it, script it, compile it.

Below the public face: the registry shows that a wrapper keeps no session alive.
"""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import backward
from models import quietly, sgd
from torch import Tensor, nn

import mpinit
from mpinit import registry

F16, F32 = torch.float16, torch.float32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).relu())


X = torch.linspace(-1, 1, 12).view(3, 4)


def plainly(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: forward(*args, **kwargs) * 2


def with_wraps(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def twice(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) * 2

    return twice


class ConvertOutputs:
    """As Accelerate's convert_outputs_to_fp32."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs).float() * 2


def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    fast = torch.compile(forward, backend="eager", fullgraph=True)
    return lambda *args, **kwargs: fast(*args, **kwargs) * 2


WRAPPERS = {"plain": plainly, "wraps": with_wraps, "an object": ConvertOutputs, "compiled": compiled}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, of what a compiled part is given
@pytest.mark.parametrize("where", ["the model", "a part"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("how", WRAPPERS)
def test_a_wrapper_put_on_later_survives_undo_and_works(how: str, level: str, where: str) -> None:
    model = quietly(Net().eval(), level, keep_fp32="norm")
    owner = model if where == "the model" else model.head
    before = owner(X)
    wrapped = owner.forward = WRAPPERS[how](owner.forward)
    torch.testing.assert_close(owner(X).float(), 2 * before.float(), atol=2e-3, rtol=2e-2)
    assert bool(model(X).isfinite().all())
    mpinit.undo(model)
    assert vars(owner)["forward"] is wrapped
    assert not [name for name, module in model.named_modules() if "forward" in vars(module) and module is not owner]
    expected = 2 * type(owner).forward(owner, X)
    assert expected.dtype is owner(X).dtype is F32
    assert torch.equal(owner(X), expected), "nothing is cast any more"
    quietly(model, "O5")
    assert model(X).dtype is F32
    torch.testing.assert_close(owner(X), expected, atol=0.1, rtol=0.1)
    mpinit.undo(model)
    assert vars(owner)["forward"] is wrapped
    assert torch.equal(owner(X), expected)


def test_undo_does_not_bring_back_what_was_removed_or_replaced() -> None:
    model = Net().eval()
    model.forward = plainly(model.forward)  # type: ignore[method-assign]
    quietly(model)
    del model.forward
    mpinit.undo(model)
    assert "forward" not in vars(model)
    quietly(model)
    model.forward = own = lambda x: x  # type: ignore[method-assign]
    mpinit.undo(model)
    assert model.forward is own


def test_wrapper_that_copies_attributes_keeps_no_session_alive() -> None:
    model = quietly(Net())
    model.forward = wrapped = with_wraps(model.forward)  # type: ignore[method-assign]
    session = weakref.ref(registry.of(model))  # type: ignore[arg-type]
    assert not {"owner", "boundary"} & set(vars(wrapped))
    mpinit.undo(model)
    gc.collect()
    assert session() is None


LEVELS = ["O0", "O1", "O2", "O3", "O5"]


def trained(level: str, zero_grad: bool = False, **keywords: Any) -> nn.Module:
    """After a step, with gradients about: at O2 these are float32 while the weights are not."""
    torch._dynamo.reset()
    model = Net()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, level, keep_fp32="norm", **keywords)
    backward(model(X).square().sum(), optimizer)
    optimizer.step()
    if zero_grad:
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # undone in the same forward
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_an_exported_model_computes_what_the_model_does(level: str, strict: bool) -> None:
    model = trained(level, zero_grad=True)
    exported = torch.export.export(model, (X,), strict=strict).module()
    assert exported(X).dtype is model(X).dtype
    assert torch.equal(exported(X), model(X))
    part = torch.export.export(model.body, (X,), strict=strict).module()
    assert torch.equal(part(X), model.body(X))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("level", LEVELS)
def test_a_traced_model_computes_what_the_model_does(level: str) -> None:
    model = trained(level)
    traced = torch.jit.trace(model, X)
    assert traced(X).dtype is model(X).dtype
    assert torch.equal(traced(X), model(X))
    assert torch.equal(traced(X[:2] + 1), model(X[:2] + 1))
    with torch.no_grad():
        model.head.weight.zero_()
    assert torch.equal(traced(X), model(X)), "the trace holds the weights, not their values"


def test_model_that_has_gradients_is_compiled_after_reset() -> None:
    model = Net()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O5")
    for _ in range(2):
        torch._dynamo.reset()
        backward(model(X).sum(), optimizer)
        with torch.no_grad():
            fast = torch.compile(model, backend="eager", fullgraph=True)(X)
        torch.testing.assert_close(fast, model(X), atol=2e-2, rtol=2e-2)
    mpinit.undo(model)
    assert not torch._dynamo.callback_handler.start_callbacks, "nothing is called any more"


@pytest.mark.parametrize("level", ["O2", pytest.param("O5", marks=pytest.mark.nightly)])
def test_a_loop_that_compiles_anew_between_backward_and_step(level: str) -> None:
    results = []
    for compile_it in (False, True):
        torch._dynamo.reset()
        model = Net()
        optimizer = sgd(model)
        mpinit.initialize(model, optimizer, level)
        run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False) if compile_it else model
        for size in (3, 2, 3):
            for _ in range(2):  # accumulates over two
                backward(run(X[:size]).square().sum(), optimizer)
            model.eval()
            with torch.no_grad():
                run(X[:size])
            model.train()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in mpinit.master_params(optimizer)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-2)
