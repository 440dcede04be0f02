"""Methods of optimizers that were read before ``initialize``, or are called on the class."""

import copy
from typing import Any

import pytest
import torch
from loops import adam, backward, batches, keywords, mlp, mse, plain_sgd, started, train
from torch.optim import Optimizer

import mpinit

BATCH = batches(1)[0]
REPLACED = "was not called through the attribute"


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_step_that_was_kept_is_refused(level: str) -> None:
    """Refuse a step that would change 16-bit weights without their masters, or step inf; the patched one goes on."""
    model = mlp()
    optimizer = plain_sgd(model.parameters())
    kept, compiled = optimizer.step, torch.compile(optimizer.step, backend="eager")
    mpinit.initialize(model, optimizer, **keywords(level))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    backward(mse(model, BATCH) * float("inf" if level != "O5" else 1), optimizer)
    for step in (kept, compiled, lambda: type(optimizer).step(optimizer)):
        with pytest.raises(RuntimeError, match=f"SGD.step {REPLACED}"):
            step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.step()
    assert mpinit.step_counts(optimizer) == ((1, 0) if level == "O5" else (0, 1))


def test_step_that_was_kept_runs_without_masters_and_scale() -> None:
    """Step where the optimizer's own step does the same, and after ``undo``."""
    for level, more in (("O0", {}), ("O4", {"skip_nonfinite": False})):
        model = mlp()
        optimizer = plain_sgd(model.parameters())
        kept = optimizer.step
        mpinit.initialize(model, optimizer, **keywords(level), **more)
        mse(model, BATCH).backward()
        before = model[0].weight.detach().clone()
        kept()
        assert not torch.equal(model[0].weight, before)
    model = mlp()
    optimizer = plain_sgd(model.parameters())
    kept = optimizer.step
    mpinit.initialize(model, optimizer, **keywords("O2"))
    mpinit.undo(model)
    mse(model, BATCH).backward()
    kept()


class Outer(Optimizer):
    """An optimizer that steps the groups of another one."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


def test_optimizers_may_be_initialized_with_the_one_they_wrap() -> None:
    """Load into either of two initialised optimizers, one of which wraps the other."""
    model = mlp()
    inner = adam(model.parameters())
    outer = Outer(inner)
    mpinit.initialize(model, [outer, inner], **keywords("O5"))
    mse(model, BATCH).backward()
    outer.step()
    inner.load_state_dict(copy.deepcopy(inner.state_dict()))
    outer.load_state_dict(copy.deepcopy(inner.state_dict()))
    assert inner.state[model[0].weight]["exp_avg"].dtype == torch.float32


def test_scheduler_that_wrapped_step_works_between_sessions() -> None:
    """Step in a second session, where a scheduler keeps the first one's method in place."""
    model = mlp()
    optimizer = plain_sgd(model.parameters())
    mpinit.initialize(model, optimizer, **keywords("O2"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mpinit.undo(model)
    other, _ = started("O2")
    mse(model, BATCH).backward()
    optimizer.step()
    mpinit.initialize(model, optimizer, **keywords("O5"))
    train(model, optimizer, batches(2))
    assert mpinit.step_counts(optimizer) == (2, 0) and other is not model
