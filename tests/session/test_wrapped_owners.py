"""Optimizers in the wrappers of frameworks, recognised by the attribute that they document, and wrapped models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import Forwarding, backward, batches, mlp, momentum, mse, same
from torch import nn
from torch.optim import SGD, Optimizer

import mpinit
from mpinit import registry


class Accelerated(Forwarding):
    """As accelerate's AcceleratedOptimizer: an Optimizer whose groups and state are properties."""

    # By which it is told from an optimizer that wraps another and does more in its step.
    __module__ = "accelerate.optimizer"


class Lightning:
    """As Lightning's and Fabric's: a class made on the spot, the optimizer behind a property, the rest handed on."""

    __module__ = "lightning.pytorch.core.optimizer"

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class ScheduleFree:
    """As schedule-free's wrapper: no Optimizer, which steps in a way of its own."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state


class Lookahead(Optimizer):
    """An optimizer of its own kind, that has another."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


WRAPPERS = [Accelerated, Lightning, lambda optimizer: Accelerated(Lightning(optimizer))]  # type: ignore[arg-type]
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS, ids=["accelerated", "lightning", "both"])


@each_wrapper
@pytest.mark.parametrize("when", ["before", "after", "late"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_wrapper_stands_for_its_optimizer(wrap: Any, when: str, level: str) -> None:
    usual, model = mlp(), mlp()
    optimizer, inner = momentum(usual.parameters()), momentum(model.parameters())
    mpinit.initialize(usual, optimizer, level, verbosity=0, init_loss_scale=1024.0)
    more: dict[str, Any] = {"opt_level": level, "verbosity": 0, "init_loss_scale": 1024.0}
    if when == "after":
        mpinit.initialize(model, inner, **more)
    outer = wrap(inner)
    if when == "before":
        assert mpinit.initialize(model, outer, **more)[1] is outer
    elif when == "late":
        mpinit.initialize(model, await_optimizers=True, **more)
        assert mpinit.add_optimizers(outer) is outer
    assert registry.of(outer) is registry.of(inner) is registry.of(model)
    scaler = mpinit.GradScaler(outer)
    for batch in batches(3):
        for each, owner in ((usual, optimizer), (model, outer)):
            owner.zero_grad()
            backward(mse(each, batch), owner)
            mpinit.clip_grad_norm_(owner, 0.1)
            owner.step()
    for batch in batches(2):
        optimizer.zero_grad()
        outer.zero_grad()
        backward(mse(usual, batch), optimizer)
        optimizer.step()
        scaler.scale(mse(model, batch)).backward()
        scaler.unscale_(outer)
        scaler.step(outer)
        scaler.update()
    same(mpinit.master_params(outer), mpinit.master_params(optimizer))
    assert mpinit.step_counts(outer) == mpinit.step_counts(inner) == (5, 0)
    assert mpinit.loss_scale(outer) == mpinit.loss_scale(inner) and not mpinit.step_was_skipped(outer)
    assert mpinit.describe(outer) == mpinit.describe(inner)
    mpinit.load_state_dict(mpinit.state_dict(outer), outer)


def test_an_optimizer_of_its_own_kind_is_no_wrapper() -> None:
    model = mlp()
    lookahead = Lookahead(SGD(model.parameters(), lr=0.1))
    mpinit.initialize(model, lookahead, "O5", verbosity=0)
    session: Any = registry.of(lookahead)
    assert session.optimizers == [lookahead]


def test_a_wrapper_that_is_no_optimizer() -> None:
    model = mlp()
    base = SGD(model.parameters(), lr=0.1)
    outer: Any = ScheduleFree(base)
    with pytest.raises(TypeError, match=r"ScheduleFree is no Optimizer, .* give the SGD inside of it"):
        mpinit.initialize(model, outer, "O5")
    mpinit.initialize(model, base, "O5", verbosity=0)
    backward(mse(model, batches(1)[0]), outer)
    assert len(list(mpinit.master_params(outer))) == 4
    with pytest.raises(TypeError, match="optimizers must be a torch"):
        mpinit.scale_loss(torch.ones(()), object())


def test_wrapped_models() -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", verbosity=0)
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert mpinit.describe(wrapped) == mpinit.describe(model)
    assert mpinit.GradScaler(nn.DataParallel(model)).is_enabled()
    mpinit.undo(nn.DataParallel(model))
    assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("given_first", ["outer", "inner"])
def test_a_compiled_model_and_what_is_in_it_stand_for_one_another(level: str, given_first: str) -> None:
    inner = mlp()
    outer = torch.compile(inner, backend="eager")
    given, other = (outer, inner) if given_first == "outer" else (inner, outer)
    optimizer = momentum(inner.parameters())
    for undone in (given, other):
        mpinit.initialize(given, optimizer, level, verbosity=0, init_loss_scale=1024.0)
        assert registry.of(inner) is registry.of(outer) is registry.of(optimizer)
        assert mpinit.describe(other) == mpinit.describe(given)
        assert mpinit.GradScaler(other).get_scale() == mpinit.loss_scale(optimizer)
        backward(mse(other, batches(1)[0]), optimizer)
        optimizer.step()
        with pytest.raises(ValueError, match="was initialised already"):
            mpinit.initialize(other, opt_level=level, verbosity=0)
        mpinit.undo(undone)
        assert registry.of(inner) is registry.of(outer) is None
        with pytest.raises(ValueError, match="is not initialised"):
            mpinit.undo(other)


def test_a_model_that_has_more_than_another_in_it_is_none_of_its_wrappers() -> None:
    teacher = mlp()
    mpinit.initialize(teacher, opt_level="O1", verbosity=0)
    student = nn.Sequential()
    student.module, student.head = teacher, nn.Linear(3, 3)
    mpinit.initialize(student, opt_level="O1", verbosity=0)
    assert registry.of(student) is not registry.of(teacher)
    mpinit.undo(teacher)
    assert registry.of(student) is not None
