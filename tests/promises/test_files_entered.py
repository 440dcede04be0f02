"""How many of the library's files a newcomer has to open to follow one call: those that it enters."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import mpinit

ROOT = str(Path(mpinit.__file__).parent)


def files_entered(function: Callable[[], Any]) -> set[str]:
    """The files of the library in which a call runs functions."""
    found = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.add(frame.f_code.co_filename.removeprefix(ROOT))

    gc.collect()
    gc.disable()  # what becomes of other tests' sessions
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@pytest.mark.parametrize(("level", "set_up", "iteration"), [("O0", 20, 8), ("O2", 45, 20), ("O5", 45, 20)])
def test_a_call_enters_few_files(level: str, set_up: int, iteration: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(4, 8)

    def train() -> None:
        with mpinit.scale_loss(model(inputs).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    # What the process does once, for whatever model comes first, is no way through this one.
    mpinit.undo(mpinit.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0))
    found = files_entered(lambda: mpinit.initialize(model, optimizer, opt_level=level, verbosity=0))
    assert len(found) <= set_up, sorted(found)
    for _ in range(3):
        train()
    found = files_entered(train)
    assert len(found) <= iteration, sorted(found)
    assert len(files_entered(lambda: model(inputs))) <= 8
    mpinit.undo(model)
