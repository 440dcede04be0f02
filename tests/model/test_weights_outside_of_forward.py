"""``master_weights="model"`` between forwards: float32 parameters after failures, writes, copies and in threads.

Below the public face: a cast is made to fail in the middle.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Parts
from torch import Tensor, nn
from weights_in_forward import BF16, F32, is_float32_outside, start

from mpinit.model.forward_weights import WeightCasts


class Raising(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.dtype is BF16
        assert isinstance(self.weight, nn.Parameter)
        raise KeyError


def test_weights_are_float32_outside_after_an_exception_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Raising(4, 4))
    start(model)
    with pytest.raises(KeyError):
        model(torch.ones(1, 4))
    is_float32_outside(model)
    assert model[0](torch.ones(1, 4)).dtype is F32
    is_float32_outside(model)


MAY_FAIL = [(nn.RNNBase, "_init_flat_weights"), (WeightCasts, "_renew")]


@pytest.mark.parametrize(("owner", "name"), MAY_FAIL)
def test_failing_cast_restores_parameters(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), Parts(lambda self, pair: pair[0]), nn.Linear(4, 4))
    start(model)
    real, calls = getattr(owner, name), []

    def fails_once(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise MemoryError
        return real(*given)

    monkeypatch.setattr(owner, name, fails_once)
    with pytest.raises(MemoryError):
        model(torch.ones(1, 4))
    is_float32_outside(model)
    assert model(torch.ones(1, 4)).dtype is F32
    is_float32_outside(model)


WRITES: dict[str, Callable[[Any], Any]] = {
    "data": lambda weight: weight.data.mul_(2),
    "detached": lambda weight: weight.detach().mul_(2),
    "data =": lambda weight: setattr(weight, "data", weight.data * 2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_reach_the_next_forward(write: Callable[[nn.Parameter], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    start(model)
    x = torch.eye(4)
    before = model(x)
    write(model[0].weight)
    assert torch.equal(model(x), before * 2)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(model(x), before * 4)
    model.load_state_dict({"0.weight": model[0].weight.detach() * 2})
    assert torch.equal(model(x), before * 8)
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    assert torch.equal(model(x), torch.ones(4, 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_copies_pickles_and_traces() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = start(model)
    x = torch.randn(3, 4)
    expected = model(x)
    copied = copy.deepcopy(model)
    is_float32_outside(copied)
    assert not torch.equal(copied(x), expected), "a copy computes in float32"
    traced = torch.jit.trace(model, x)
    exported = torch.export.export(model, (x,)).module()
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(traced(x), model(x)), "casts are recorded, not their results"
    assert torch.equal(exported(x), traced(x))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_functional_calls_and_transforms() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    start(model)
    x = torch.ones(1, 4)
    double = {name: value.detach() * 2 for name, value in model.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, double, x), model(x) * 2)
    gradient = torch.func.grad(lambda own: torch.func.functional_call(model, own, x).sum())(double)
    assert gradient["0.weight"].dtype is F32
    assert torch.func.vmap(model)(torch.ones(3, 1, 4)).shape == (3, 1, 4)
    is_float32_outside(model)
    model(x).sum().backward()


class Slow(nn.Linear):
    """Waits inside of its forward."""

    def __init__(self) -> None:
        super().__init__(4, 1, bias=False)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.entered.set()
            self.go_on.wait(10)
        return super().forward(x)


@pytest.mark.parametrize("of_part", [True, False])
def test_a_forward_that_another_thread_runs_is_not_run_here_too(of_part: bool) -> None:
    """Run a model, or a part of it, in two threads: it is refused, and works when the other has ended."""
    slow = Slow()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), slow)
    optimizer = start(model)
    model.eval()
    x, called = torch.randn(3, 4), slow if of_part else model
    expected = model(x).detach()
    found: list[Tensor] = []

    def evaluate() -> None:
        with torch.no_grad():
            found.append(model(x))

    other = threading.Thread(target=evaluate)
    other.start()
    assert slow.entered.wait(10)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"runs in another thread.*copy of its own"):
            called(x)
    optimizer.step()
    state = model.state_dict()
    slow.go_on.set()
    other.join()
    assert torch.equal(found[0], expected) and torch.equal(model(x), expected)
    assert {value.dtype for name, value in state.items() if "num" not in name} == {F32}
    is_float32_outside(model)
