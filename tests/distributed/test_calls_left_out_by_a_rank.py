"""A rank that leaves out a step, a backward pass or a forward: the others do not wait, unless plain torch's do."""

import itertools
from typing import Any

import engines
import torch.distributed as dist
from processes import ranks

import mpinit

STEPS, RANK, CYCLE = 4, 1, 1
NAMES = ("ddp", "ddp no_sync", "fsdp by layer", "fsdp unsynced", "hsdp", "tp", "tp fsdp")
STYLES = {"scale_loss": ("O2", "O5"), "GradScaler": ("O2",), "plain": ("O5",)}
# In plain torch, too, ranks wait for one another there until the group's timeout: a backward pass gathers and reduces,
# and DistributedDataParallel reduces in a later pass what it has prepared for in a forward without a backward.
WAITS_IN_TORCH = {(name, "backward") for name in NAMES if name != "ddp"}
CELLS = [
    (name, style, level, what)
    for name, (style, levels), what in itertools.product(NAMES, STYLES.items(), ("step", "backward", "forward"))
    for level in levels
    if (name, what) not in WAITS_IN_TORCH
]
ALWAYS = [
    *[("ddp", "scale_loss", "O2", what) for what in ("step", "backward", "forward")],
    *[("fsdp by layer", *rest, "step") for rest in (("scale_loss", "O2"), ("GradScaler", "O2"), ("plain", "O5"))],
]


def cycles_of(what: str) -> int:
    """The cycles of this rank: all ranks make as many collectives."""
    return STEPS + (dist.get_rank() == RANK and what != "step")


def trained(name: str, style: str, level: str, what: str) -> tuple[engines.State, Any]:
    engine = engines.ENGINES[name]
    runs, model, optimizer = engines.pair(engine, level)
    scaler = mpinit.GradScaler(optimizer)
    for index, micros in enumerate(engines.cycles(engine, cycles_of(what))):
        left_out = what if (dist.get_rank(), index) == (RANK, CYCLE) else None
        if left_out == "forward":
            continue
        optimizer.zero_grad()
        for loss in engines.passes(engine, runs, micros):
            if left_out == "backward":
                continue
            if style == "GradScaler":
                scaler.scale(loss).backward()
            elif style == "plain":
                loss.backward()
            else:
                with mpinit.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
        if left_out is not None:
            continue
        if style == "GradScaler":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    assert mpinit.step_counts(optimizer) == (STEPS - (what == "step" and dist.get_rank() == RANK), 0)
    engines.assert_one(mpinit.loss_scale(optimizer))
    state = engines.whole(model.state_dict())
    mpinit.undo(model)
    return state, optimizer


@ranks(4, *ALWAYS, long=CELLS)
def test_left_out_as_by_hand(name: str, style: str, level: str, what: str) -> None:
    """Compare with the bits of the same loop in plain torch."""
    engine = engines.ENGINES[name]
    state, _ = trained(name, style, level, what)
    leaves_out = {CYCLE: what} if dist.get_rank() == RANK else {}
    engines.assert_same(state, engines.trained_by_hand(engine, level, cycles_of(what), leaves_out=leaves_out))
