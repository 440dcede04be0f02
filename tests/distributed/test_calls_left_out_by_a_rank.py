"""A rank that leaves out a step, a backward pass or a forward: the others do not wait, or all end with an error."""

import contextlib
import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import pytest
import torch.distributed as dist
from processes import end_with, launch_ending, ranks

import mpinit

STEPS, RANK, CYCLE = 4, 1, 1
# With two losses DistributedDataParallel's ranks exchange verdicts, too.
ENGINES = engines.ENGINES | {"ddp two losses": replace(engines.ENGINES["ddp"], micros=2)}
NAMES = ("ddp", "ddp two losses", "ddp no_sync", "fsdp by layer", "fsdp unsynced", "hsdp", "tp", "tp fsdp")
STYLES = {"scale_loss": ("O2", "O5"), "GradScaler": ("O2",), "plain": ("O5",)}
# In plain torch ranks wait there until the group's timeout, or gloo ends them: a backward pass gathers and reduces, and
# DistributedDataParallel reduces in a later pass what it has prepared for in a forward without a backward.
WAITS_IN_TORCH = {(name, "backward") for name in NAMES if name not in ("ddp", "ddp two losses")}
CELLS = [
    (name, style, level, what)
    for name, (style, levels), what in itertools.product(NAMES, STYLES.items(), ("step", "backward", "forward"))
    for level in levels
    if (name, what) not in WAITS_IN_TORCH
]
ALWAYS = [
    *[("ddp", "scale_loss", "O2", what) for what in ("step", "backward", "forward")],
    ("ddp two losses", "scale_loss", "O2", "backward"),
    *[("fsdp by layer", *rest, "step") for rest in (("scale_loss", "O2"), ("GradScaler", "O2"), ("plain", "O5"))],
]


def cycles_of(what: str) -> int:
    """The cycles of this rank: all ranks make as many collectives."""
    return STEPS + (dist.get_rank() == RANK and what != "step")


def backward(style: str, loss: Any, optimizer: Any, scaler: Any, loss_id: int = 0) -> None:
    if style == "GradScaler":
        scaler.scale(loss).backward()
    elif style == "plain":
        loss.backward()
    else:
        with mpinit.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()


def step(style: str, optimizer: Any, scaler: Any) -> None:
    if style == "GradScaler":
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()


def trained(name: str, style: str, level: str, what: str) -> tuple[engines.State, Any]:
    engine, losses = ENGINES[name], 2 if name == "ddp two losses" else 1
    runs, model, optimizer = engines.pair(engine, level, num_losses=losses)
    scaler = mpinit.GradScaler(optimizer)
    for index, micros in enumerate(engines.cycles(engine, cycles_of(what))):
        left_out = what if (dist.get_rank(), index) == (RANK, CYCLE) else None
        if left_out == "forward":
            continue
        optimizer.zero_grad()
        for number, loss in enumerate(engines.passes(engine, runs, micros)):
            if left_out == "backward":
                continue
            backward(style, loss, optimizer, scaler, number % losses)
        if left_out is not None:
            continue
        step(style, optimizer, scaler)
    assert mpinit.step_counts(optimizer) == (STEPS - (what == "step" and dist.get_rank() == RANK), 0)
    engines.assert_one(mpinit.loss_scale(optimizer))
    state = engines.whole(model.state_dict())
    mpinit.undo(model)
    return state, optimizer


@ranks(4, *ALWAYS, long=CELLS)
def test_left_out_as_by_hand(name: str, style: str, level: str, what: str) -> None:
    """Compare with the bits of the same loop in plain torch."""
    engine = ENGINES[name]
    state, _ = trained(name, style, level, what)
    leaves_out = {CYCLE: what} if dist.get_rank() == RANK else {}
    engines.assert_same(state, engines.trained_by_hand(engine, level, cycles_of(what), leaves_out=leaves_out))


def all_without_backward(name: str, style: str, level: str, end: str) -> tuple[engines.State, Any]:
    """Leave out the backward passes of one cycle on all ranks, which is no fault: an evaluation may do so."""
    engine = ENGINES[name]
    runs, model, optimizer = engines.pair(engine, level)
    scaler = mpinit.GradScaler(optimizer)
    for index, micros in enumerate(engines.cycles(engine, STEPS)):
        optimizer.zero_grad()
        for loss in engines.passes(engine, runs, micros):
            if index == CYCLE:
                continue
            backward(style, loss, optimizer, scaler)
        # Some ranks call a step that has nothing to do.
        if index == CYCLE and (end == "continue" or dist.get_rank() % 2):
            continue
        step("plain" if index == CYCLE else style, optimizer, scaler)
    state = engines.whole(model.state_dict())
    mpinit.undo(model)
    return state, optimizer


ALL_RANKS = [
    (name, style, level, end)
    for name, (style, levels), end in itertools.product(NAMES, STYLES.items(), ("continue", "step"))
    for level in levels
]


@ranks(
    4,
    ("ddp two losses", "scale_loss", "O2", "step"),
    ("fsdp by layer", "scale_loss", "O2", "continue"),
    ("fsdp by layer", "plain", "O5", "step"),
    ("tp fsdp", "GradScaler", "O2", "step"),
    long=ALL_RANKS,
)
def test_backward_passes_that_all_ranks_leave_out(name: str, style: str, level: str, end: str) -> None:
    """Compare with the bits of the same loop in plain torch."""
    state, _ = all_without_backward(name, style, level, end)
    engine = ENGINES[name]
    engines.assert_same(state, engines.trained_by_hand(engine, level, STEPS, leaves_out={CYCLE: "backward"}))


def contrastive(name: str, level: str | None, leaves_out: int | None) -> engines.State:
    """Two forwards before each backward pass, by mpinit or in plain torch; this rank leaves out one pass."""
    engine = replace(ENGINES[name], micros=2, quiet=contextlib.nullcontext)
    if level is None:
        model = runs = engine.wrap(engine.network(), None)
        optimizer = engines.sgd(model.parameters())
    else:
        runs, model, optimizer = engines.pair(engine, level)
    for index, micros in enumerate(engines.cycles(engine, STEPS)):
        optimizer.zero_grad()
        first, second = list(engines.passes(engine, runs, micros))
        if index == leaves_out:
            continue
        loss = first + second
        with contextlib.nullcontext(loss) if level is None else mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    state = engines.whole(model.state_dict())
    if level is not None:
        mpinit.undo(model)
    return state


@ranks(4, ("fsdp by layer",), ("tp",), long=[("hsdp",), ("tp fsdp",)])
def test_two_forwards_before_a_backward_pass(name: str) -> None:
    """Compare with the bits of the same loop in plain torch, also where all ranks leave out a pass."""
    for leaves_out in (None, 2):
        engines.assert_same(contrastive(name, "O0", leaves_out), contrastive(name, None, leaves_out))


# In plain torch ranks wait there, or gloo ends them; mpinit refuses. "ddp no_sync" is as in plain torch, where ranks
# wait at the end of training only.
REFUSED = [
    (name, style, level, end)
    for name, (style, levels), end in itertools.product(NAMES, STYLES.items(), ("continue", "step", "last step"))
    for level in levels
    if not name.startswith("ddp")
]
REFUSED += [("fsdp by layer", "scale_loss", "O2", "file store")]
REFUSED += [(name, "scale_loss", "O2", "two forwards") for name in ("fsdp by layer", "hsdp", "tp", "tp fsdp")]
ALWAYS_REFUSED = [("fsdp by layer", "scale_loss", "O2", "continue"), ("tp", "plain", "O5", "step")]
NIGHTLY_REFUSED = [cell for cell in REFUSED if cell[1:3] == ("scale_loss", "O5") or cell[3] == "last step"]


def mark_of(cell: tuple[str, str, str, str]) -> list[Any]:
    return [] if cell in ALWAYS_REFUSED else [pytest.mark.nightly if cell in NIGHTLY_REFUSED else pytest.mark.long]


def without_backward(name: str, style: str, level: str, end: str) -> None:
    """Leave out the backward pass of one cycle, and end the process after an error, or after the last cycle."""
    if end == "file store":
        rank, path = dist.get_rank(), Path(os.environ["TMPDIR"], "store of backward passes")
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(str(path), 4), rank=rank, world_size=4)
    engine = ENGINES[name]
    runs, _, optimizer = engines.pair(engine, level)
    scaler = mpinit.GradScaler(optimizer)
    where, start = STEPS - 1 if end == "last step" else CYCLE, 0.0
    words = "ended"
    try:
        if end == "two forwards":
            engines.on_all_ranks("are here")
            start = time.monotonic()
            contrastive(name, level, STEPS - 2 if dist.get_rank() == RANK else None)
            raise AssertionError("not refused")
        for index, micros in enumerate(engines.cycles(engine, STEPS)):
            left_out = (dist.get_rank(), index) == (RANK, where)
            if index == where:
                engines.on_all_ranks("are here")
                start = time.monotonic()
            optimizer.zero_grad()
            for loss in engines.passes(engine, runs, micros):
                if left_out:
                    continue
                backward(style, loss, optimizer, scaler)
            if left_out and end in ("continue", "file store"):
                continue
            step(style, optimizer, scaler)
    except Exception as error:
        words = str(error)
    end_with(json.dumps((time.monotonic() - start, words)))


cells_without_backward = ranks(4, *REFUSED)(without_backward)


@pytest.mark.parametrize("cell", [pytest.param(cell, marks=mark_of(cell)) for cell in REFUSED], ids="-".join)
def test_backward_pass_that_one_rank_leaves_out_is_refused(cell: tuple[str, str, str, str]) -> None:
    """End all ranks: the one that has left it out by a clear error, or with its loop, and the others after it."""
    name = "-".join([without_backward.__name__, *(word.replace(" ", "_") for word in cell)])
    ends = launch_ending(Path(__file__), name, 4, patience=80.0)
    assert all(ends), f"ranks {[rank for rank, words in enumerate(ends) if not words]} hang"
    ended = [json.loads(words) for words in ends]
    assert all(seconds < 15.0 for seconds, _ in ended), ended
    for rank, (_, words) in enumerate(ended):
        if rank != RANK:
            assert words != "ended" and "backward" not in words, words
        elif cell[1] == "GradScaler" and cell[3] != "continue" and cell[0] != "fsdp unsynced":
            assert "No inf checks were recorded" in words, words  # as in plain torch
        elif cell[1] != "scale_loss" or cell[3] != "last step":
            assert "has run no backward pass" in words and "loss * 0" in words, words
