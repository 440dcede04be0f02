"""Schedulers that pass over skipped steps."""

from __future__ import annotations

import copy

import pytest
import torch
from loops import mlp
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, ReduceLROnPlateau

from mpinit.optimizer.schedulers import wait_for_steps


@pytest.mark.parametrize("kind", [ExponentialLR, ReduceLROnPlateau])
def test_a_scheduler_waits_where_a_step_was_skipped_and_stays_what_it_was(kind: type[LRScheduler]) -> None:
    optimizer = torch.optim.SGD(mlp().parameters(), lr=1.0)
    scheduler = ExponentialLR(optimizer, 0.5) if kind is ExponentialLR else ReduceLROnPlateau(optimizer, "min", 0.5, 0)
    arguments = () if kind is ExponentialLR else (torch.inf,)
    state, skipped = set(scheduler.state_dict()), [True]
    undo = wait_for_steps(scheduler, lambda _: skipped[0])
    assert isinstance(scheduler, kind) and set(scheduler.state_dict()) == state
    optimizer.step()
    scheduler.step(*arguments)
    assert optimizer.param_groups[0]["lr"] == 1.0
    skipped[0] = False
    scheduler.step(*arguments)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert isinstance(copy.deepcopy(scheduler), kind)
    skipped[0] = True
    undo()
    undo()
    assert type(scheduler) is kind
    scheduler.step(*arguments)
    assert optimizer.param_groups[0]["lr"] == 0.25
