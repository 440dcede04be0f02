"""Engine, level, masters, an overflow on one rank, accumulation and a checkpoint in all combinations, on four ranks."""

from __future__ import annotations

import copy
import itertools
import time
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from engines import (
    DTYPES,
    ENGINES,
    Engine,
    assert_one,
    assert_same,
    cycles,
    ddp,
    no_sync,
    pair,
    passes,
    refused,
    trained_by_hand,
    unsynced,
    whole,
)
from models import LEVELS
from processes import ranks
from torch.testing import assert_close

import mpinit

STEPS = 4
QUIET: dict[str, Any] = {"ddp": no_sync, "fsdp by layer": unsynced, "hsdp": unsynced, "tp fsdp": unsynced}
NAMES = ("ddp", "fsdp by layer", "hsdp", "tp", "tp fsdp")
OVERFLOWS, ACCUMULATES, RESUMES = ("", "overflow"), ("", "no_sync"), ("", "checkpoint")
CELLS = list(itertools.product(NAMES, LEVELS, OVERFLOWS, ACCUMULATES, RESUMES))


def built(engine: Engine, level: str, overflows: bool) -> Any:
    scaling: dict[str, Any] = {"loss_scale": "dynamic", "init_loss_scale": 1024.0} if overflows else {}
    return pair(engine, level, **scaling)


@ranks(4, ("ddp", "O2", "overflow", "no_sync", "checkpoint"), long=CELLS)
def test_cell(name: str, level: str, overflow: str, accumulates: str, resumes: str) -> None:
    """The bits of a loop by hand without the step that overflowed, O1's and O4's near float32; or refused by all."""
    # DDP sorts gradients into other buckets after its first step, and would not resume to the bit.
    engine = replace(ENGINES[name], wrap=ddp(find_unused_parameters=True)) if name == "ddp" else ENGINES[name]
    if accumulates:
        engine = replace(engine, micros=2, quiet=QUIET.get(name, engine.quiet))
    start = time.monotonic()
    if level in engine.refused:
        with refused(ValueError, *engine.refused[level]):
            built(engine, level, bool(overflow))
        assert time.monotonic() - start < 10
        return
    runs, model, optimizer = built(engine, level, bool(overflow))
    for index, micros in enumerate(cycles(engine, STEPS)):
        if resumes and index == 2:
            saved = copy.deepcopy(mpinit.TrainState(runs, optimizer).state_dict())
            mpinit.undo(model)
            runs, model, optimizer = built(engine, level, bool(overflow))
            mpinit.TrainState(runs, optimizer).load_state_dict(saved)
        bad = bool(overflow) and index == 1
        optimizer.zero_grad()
        for loss in passes(engine, runs, micros):
            factor = float("inf") if bad and dist.get_rank() == 2 else 1.0
            with mpinit.scale_loss(loss * factor, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        assert bool(mpinit.step_was_skipped(optimizer)) == bad
        assert_one(mpinit.loss_scale(optimizer))
    state = whole(model.state_dict())
    assert_one(list(state.values()))
    # A second scaled loss adds to tensor parallel gradients in float32, and one by hand in 16 bit.
    sums = name == "tp" and bool(accumulates) and (bool(overflow) or level == "O2")
    exact = level in DTYPES and not (level == "O3" or (engine.has_policy and level == "split"))
    by_hand = trained_by_hand(engine, level if exact else "O0", STEPS, skips=(1,) if overflow else ())
    if exact and not sums and not (overflow and level == "O0"):
        assert_same(state, by_hand)
    for key, value in by_hand.items():
        assert_close(state[key], value, atol=2e-2, rtol=2e-2, msg=lambda text, key=key: f"{key}: {text}")
