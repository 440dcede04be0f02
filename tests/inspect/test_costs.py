"""What is not asked for costs nothing: no operation, and no Python call for a parameter, on the good path."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import batches, iterate, mse, start
from torch import nn

import mpinit
from mpinit.torch_internals.operations import OperationsSeen

INSPECT = str(Path(mpinit.__file__).parent / "inspect")
OWN = str(Path(mpinit.__file__).parent)


def network(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *(nn.Linear(6, 6) for _ in range(layers)), nn.Linear(6, 3))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    iterate(mse(model, batches(1)[0]), optimizer)


def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[str], Counter[str]]:
    """Operations, and Python calls of the package's own code by file and function, of one good step."""
    operations: list[str] = []
    calls: Counter[str] = Counter()

    def around(operation: Any, args: Any, kwargs: Any, run: Any) -> Any:
        operations.append(str(operation))
        return run()

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    one_step(model, optimizer)
    with OperationsSeen(around):
        one_step(model, optimizer)
    sys.setprofile(profile)
    try:
        one_step(model, optimizer)
    finally:
        sys.setprofile(None)
    return operations, calls


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_off_nothing_of_it_runs_on_good_steps(level: str) -> None:
    model = network(4)
    optimizer = start(model, level)
    _, calls = counted(model, optimizer)
    watching = ("observers.py", "overflow_log.py", "operations.py", "changes.py")
    assert not [name for name in calls if name.startswith(INSPECT) or name.split(":")[0].endswith(watching)]
    told = [calls[name] for name in calls if name.endswith("tell_of_backward")]
    assert sum(told) <= 1, "once a backward pass, whatever the number of parameters"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_was_on_and_is_off_again_leaves_no_operation_and_no_call(level: str) -> None:
    model = network(4)
    optimizer = start(model, level)
    before = counted(model, optimizer)
    with mpinit.History(optimizer):
        mpinit.stalled(optimizer, start=True)
        with mpinit.watch_overflow(model):
            one_step(model, optimizer)
        mpinit.stalled(optimizer)
    assert counted(model, optimizer) == before


def test_history_waits_for_nothing_until_it_is_read() -> None:
    """On the meta device any read of a number raises."""
    from mpinit.inspect.history import History
    from mpinit.scaling.scaler import LossScaler

    model = network(1)
    optimizer = start(model, "O2")
    history = History(optimizer, capacity=2)
    scaler: LossScaler = mpinit.registry.of(optimizer).scalers[0]  # type: ignore[union-attr]
    for parameter in mpinit.master_params(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(5):
        history.backward_ended(torch.zeros((), device="meta"), scaler)
        history.step_ended(torch.zeros((), device="meta"))
    assert len(history) == 2
    with pytest.raises((RuntimeError, NotImplementedError)):
        history.rows()
