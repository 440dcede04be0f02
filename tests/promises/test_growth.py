"""Nothing grows faster than what it is done to: counted in calls, which no clock disturbs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import LEVELS
from torch import nn

import mpinit

# At four times the size as many calls, and no more than a little beside.
SMALL, LARGE = 6, 24
ALLOWED = 1.1 * LARGE / SMALL


def calls_of(run: Callable[[], Any]) -> int:
    """How many functions, of Python and of C, a run calls."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    try:
        sys.setprofile(note)
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def calls_of_a_life(way: dict[str, Any], modules: int, optimizers: int) -> dict[str, int]:
    """Calls of each part of a session's life, on as many modules and optimizers."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(modules)])
    shares = [list(model.parameters())[index::optimizers] for index in range(optimizers)]
    owned = [torch.optim.SGD(share, lr=0.1, momentum=0.9) for share in shares]

    def train() -> None:
        for optimizer in owned:
            optimizer.zero_grad()
        with mpinit.scale_loss(model(torch.ones(1, 2)).sum(), owned) as scaled_loss:
            scaled_loss.backward()
        for optimizer in owned:
            optimizer.step()

    counts = {"initialize": calls_of(lambda: mpinit.initialize(model, owned, verbosity=0, **way))}
    train()
    counts["step"] = calls_of(train)
    counts["state_dict"] = calls_of(model.state_dict)
    counts["undo"] = calls_of(lambda: mpinit.undo(model))
    return counts


@pytest.mark.parametrize("of", ["modules", "modules and optimizers"])
@pytest.mark.parametrize("way", ["O1", "O2", "split", "model", "int8"])
def test_every_part_of_a_life_is_linear(way: str, of: str) -> None:
    calls_of_a_life(LEVELS[way], 2, 1)
    small, large = (calls_of_a_life(LEVELS[way], size, 1 if of == "modules" else size) for size in (SMALL, LARGE))
    grown = {part: large[part] / small[part] for part in small}
    assert all(ratio < ALLOWED for ratio in grown.values()), grown


@pytest.mark.parametrize("way", ["O1", "O2"])
def test_a_session_costs_the_same_however_many_there_are(way: str) -> None:
    calls_of_a_life(LEVELS[way], 2, 1)
    alone = calls_of_a_life(LEVELS[way], 4, 1)
    others = [nn.Linear(2, 2) for _ in range(LARGE)]
    for other in others:
        mpinit.initialize(other, torch.optim.SGD(other.parameters(), lr=0.1), verbosity=0, **LEVELS[way])
    among_many = calls_of_a_life(LEVELS[way], 4, 1)
    for other in others:
        mpinit.undo(other)
    grown = {part: among_many[part] - alone[part] for part in alone}
    # One look at each, for tensors that two of them would share.
    assert all(more < 12 * LARGE for more in grown.values()), (alone, among_many)
