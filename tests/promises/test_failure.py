"""A failure anywhere in an iteration passes through, and training goes on from a state at most that step away."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import simulated_device
import torch
from loops import backward, keywords
from session_device import device, placed
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import mpinit

pytestmark = pytest.mark.device

# What needs a closure, sparse gradients or matrices alone.
OTHERS = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
OPTIMIZERS = [
    name
    for name, each in vars(torch.optim).items()
    if inspect.isclass(each) and issubclass(each, Optimizer) and name not in OTHERS
]
BF16 = keywords("O2", torch.bfloat16)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "full": keywords("O2"),
    "split": BF16 | {"master_weights": "split"},
    "encoded": BF16 | {"master_weights": "split", "optimizer_state": "bfloat16"},
    "encoded full": BF16 | {"optimizer_state": "int8"},
}


class Injected(Exception):
    """The failure."""


class FailsAt(TorchDispatchMode):
    """Raises at one operation."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise Injected(str(func))
        return func(*args, **(kwargs or {}))


def fails_at(at: int) -> Any:
    """A block whose n-th operation fails, on the device itself where that can be told to."""
    return simulated_device.failing_at(at) if device().type == "sim" else FailsAt(at)


FAILURES = (Injected, torch.OutOfMemoryError)


class Loop:
    """Two good iterations, and whatever the test does then."""

    def __init__(self, name: str, configuration: str) -> None:
        torch.manual_seed(0)
        # Weights of that many numbers have their states encoded.
        width = 64 if "encoded" in configuration else 4
        self.model = placed(nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2)))
        self.batch = placed(torch.randn(4, width))
        more = {"momentum": 0.9} if name == "SGD" else {}
        self.optimizer = getattr(torch.optim, name)(self.model.parameters(), lr=0.01, **more)
        mpinit.initialize(self.model, self.optimizer, **CONFIGURATIONS[configuration])
        for _ in range(2):
            self.backward()
            self.optimizer.step()
        self.backward()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        backward((self.model(self.batch) - 1.0).square().mean(), self.optimizer)

    def numbers(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]

    def check(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        """Everything is in its place; each number is what it was, what it would be, or on its way there."""
        weights = list(self.model.parameters())
        assert [id(p) for group in self.optimizer.param_groups for p in group["params"]] == list(map(id, weights))
        assert {id(key) for key in self.optimizer.state} <= set(map(id, weights))
        for weight, old, value, new in zip(weights, before, self.numbers(), after, strict=True):
            assert weight.grad is not None and weight.grad.isfinite().all()
            rounding = 2.0**-8 if weight.dtype is torch.bfloat16 else 2.0**-10
            # Optimizers move weights in several parts, of which one may be longer than all together.
            reach = 1.5 * (new - old).abs().max() + 0.011 * old.abs() + rounding * (new.abs() + old.abs())
            assert bool(((value - old).abs() <= reach + 1e-6).all()), f"{value} on the way from {old} to {new}"
        for state in self.optimizer.state_dict()["state"].values():
            assert all(bool(v.isfinite().all()) for v in state.values() if isinstance(v, torch.Tensor))
        self.goes_on()

    def goes_on(self) -> None:
        """The next iteration is done, and moves weights no further than two steps do."""
        before, (done, skipped) = self.numbers(), mpinit.step_counts(self.optimizer)
        self.backward()
        self.optimizer.step()
        assert mpinit.step_counts(self.optimizer) == (done + 1, skipped)
        for weight, old, value in zip(self.model.parameters(), before, self.numbers(), strict=True):
            assert value.isfinite().all()
            assert (value - old).abs().max() < 0.1
            assert bool(((weight.float() - value).abs() <= 2.0**-8 * value.abs() + 1e-7).all())
        mpinit.undo(self.model)


def failures(name: str, configuration: str, each: int) -> Iterator[tuple[int, Loop]]:
    """Loops in which an operation of a step has just failed: one of the first four, and every ``each``-th after."""
    for at in range(1, 10**4):
        if at > 4 and at % each:
            continue
        loop = Loop(name, configuration)
        try:
            with fails_at(at):
                loop.optimizer.step()
        except FAILURES:
            yield at, loop
        else:
            assert at > 4
            return


def check_all(name: str, configuration: str, each: int) -> None:
    loop = Loop(name, configuration)
    before = loop.numbers()
    loop.optimizer.step()
    after = loop.numbers()
    for at, failed in failures(name, configuration, each):
        try:
            failed.check(before, after)
        except AssertionError as error:
            raise AssertionError(f"after a failure at operation {at}") from error


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_an_error_in_a_step_is_at_most_that_step(configuration: str) -> None:
    rarely = 8 if "encoded" in configuration else 1
    check_all("SGD", configuration, each=rarely)
    check_all("AdamW", configuration, each=2 * rarely)


# ASGD's averages need all bits: with it encoded states are refused.
CELLS = [(name, each) for name in OPTIMIZERS for each in CONFIGURATIONS if name != "ASGD" or "encoded" not in each]


@pytest.mark.long
@pytest.mark.parametrize(("name", "configuration"), CELLS)
def test_error_at_any_operation_of_a_step_is_at_most_that_step(name: str, configuration: str) -> None:
    check_all(name, configuration, each=1)


@pytest.mark.parametrize("configuration", ["full", "split"])
def test_error_anywhere_in_a_backward_pass_leaves_nothing_scaled(configuration: str) -> None:
    loop = Loop("SGD", configuration)
    expected = [parameter.grad.clone() for parameter in loop.model.parameters()]  # type: ignore[union-attr]
    for at in range(1, 10**4):
        loop = Loop("SGD", configuration)
        loop.optimizer.zero_grad()
        loss = (loop.model(loop.batch) - 1.0).square().mean()
        try:
            with fails_at(at):
                backward(loss, loop.optimizer)
        except FAILURES:
            try:
                for parameter, gradient in zip(loop.model.parameters(), expected, strict=True):
                    found = parameter.grad
                    assert found is None or torch.allclose(found.float(), gradient.float(), rtol=0.05, atol=1e-3), found
                loop.goes_on()
            except (AssertionError, RuntimeError) as error:
                raise AssertionError(f"after a failure at operation {at} of a backward pass") from error
        else:
            assert at > 10
            return
