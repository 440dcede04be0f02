"""What is interrupted, wherever that is: a set-up leaves everything as it was, a block does not stay open.

Below the public face: the registry shows that an interrupted call leaves no session.
"""

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interruptions import interrupt, places, raise_at
from loops import backward, start
from models import LEVELS, quietly
from torch import nn
from undo_snapshots import KINDS, Snapshot, set_up

import mpinit
from mpinit import registry

IN_16_BIT = {"in 16-bit": LEVELS["O5"], "model, in 16-bit": LEVELS["O5"] | {"master_weights": "model"}}


# Interrupt at every 101st place, every 7th in a long run, and every one at night.
@pytest.mark.parametrize(
    "each", [101, pytest.param(7, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("kind", ["O0", "O1", "O2 and a float32 head", "O3", "split", "model", "int8", *IN_16_BIT])
def test_interrupted_initialize_changes_nothing(kind: str, each: int) -> None:
    asked = IN_16_BIT.get(kind) or LEVELS.get(kind) or KINDS[kind]

    trained = set_up("cnn", "adam")
    if kind == "int8":
        # Large enough for its states to be encoded.
        model = nn.Linear(64, 80)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(1, 64)).sum().backward()
        optimizer.step()
        trained = model, optimizer
    elif kind in IN_16_BIT:
        trained[0].bfloat16()
        for state in trained[1].state.values():
            state.update({key: value.bfloat16() for key, value in state.items() if value.dim()})

    def case() -> tuple[Snapshot, Callable[[], Any]]:
        model, optimizer = copy.deepcopy(trained)  # training anew for each place is most of the time
        return Snapshot(model, optimizer), lambda: mpinit.initialize(model, optimizer, **asked)

    for _ in range(2):  # the first sees what a process does once
        gc.collect()
        action = case()[1]  # kept: what is freed without an undo leaves functions patched until the next session
        *wheres, last = places(action, "", both=False)
        for session in registry.live():
            session.undo()
    assert last[0] == "initialization.py" and len(wheres) > 400
    for where in wheres[::each]:
        before, action = case()
        interrupt(where, action)
        assert not registry.live() and torch.is_grad_enabled(), where
        try:
            before.check(lambda name: False)
        except AssertionError as error:
            raise AssertionError(f"interrupted at {where}") from error
    action()  # and it can be done again


def test_a_block_that_was_interrupted_does_not_stay_open() -> None:
    model = nn.Linear(3, 2)
    optimizer = start(model)
    known = []  # as a notebook keeps the last error, and all that it has seen

    def block() -> None:
        optimizer.zero_grad()
        backward(model(torch.ones(1, 3)).sum(), optimizer)

    for where in list(places(block, "optimizer/", both=False)):
        try:
            raise_at(where, block, KeyboardInterrupt)
        except KeyboardInterrupt as interruption:
            known.append(interruption)
        with contextlib.suppress(RuntimeError):
            block()
        block()
        gradient = next(mpinit.master_params(optimizer)).grad
        assert gradient is not None and torch.equal(gradient, torch.ones(2, 3)), where
    assert len(known) > 40


@pytest.mark.parametrize("masters", [True, "split"])
def test_an_interrupted_undo_keeps_gradients(masters: Any) -> None:
    def case() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        model = quietly(nn.Linear(5, 3), "O5", master_weights=masters)
        model(torch.randn(2, 5)).square().sum().backward()
        assert model.weight.grad is not None
        return model, model.weight.grad.float()

    model, _ = case()
    wheres = [where for where in places(lambda: mpinit.undo(model), "", both=False) if "masters/masters.py" in where]
    assert len(wheres) > 10
    for where in wheres:
        model, gradient = case()
        interrupt(where, lambda model=model: mpinit.undo(model))
        for session in registry.live():
            session.undo()
        assert model.weight.dtype == torch.float32 and model.weight.grad is not None, where
        assert torch.equal(model.weight.grad, gradient), where
