"""How many of the library's files a newcomer has to open to follow one call, and how many of its calls that makes."""

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
    return set(calls_made(function))


def calls_made(function: Callable[[], Any]) -> list[str]:
    """For each call of a function of the library the file that it is in."""
    found = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.append(frame.f_code.co_filename.removeprefix(ROOT))

    gc.collect()
    gc.disable()  # what becomes of other tests' sessions
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def blocks(count: int) -> nn.Module:
    """A layer, its norm and its activation, some times."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(count)))


@pytest.mark.parametrize(("level", "set_up", "iteration"), [("O0", 20, 8), ("O2", 45, 20), ("O5", 45, 20)])
def test_a_call_enters_few_files(level: str, set_up: int, iteration: int) -> None:
    model = blocks(6)
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


@pytest.mark.parametrize(
    "keywords",
    [
        {"opt_level": "O2"},
        {"opt_level": "O3"},
        {"opt_level": "O5"},
        {"opt_level": "O5", "master_weights": "split"},
        {"opt_level": "O2", "master_weights": "model"},
    ],
    ids=str,
)
def test_a_state_dict_makes_few_calls_a_tensor(keywords: dict[str, Any]) -> None:
    calls, tensors = [], []
    for count in (5, 15):
        model = blocks(count)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, verbosity=0, **keywords)
        with mpinit.scale_loss(model(torch.randn(4, 8)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        tensors.append(len(model.state_dict()))
        calls.append(len(calls_made(model.state_dict)))
    assert (calls[1] - calls[0]) / (tensors[1] - tensors[0]) <= 10
