"""Pipelines of torch.distributed.pipelining, a stage on each of four processes; entered by distributed_matrix."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from distributed_by_hand import CastByHand, full, round_into, sgd
from distributed_engines import LEVELS, RANKS, State, batches, loss_of, text
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import mpinit

SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
CASES = [("GPipe", "O0"), *((schedule, level) for level in ("O2", "split", "model") for schedule in SCHEDULES)]


def own_stage() -> nn.Module:
    model = text()
    stages = (model.embedding, *model.blocks, nn.Sequential(model.norm, model.head))
    return stages[dist.get_rank()]


def schedule_of(kind: str, stage: nn.Module, scale: list[Any]) -> Any:
    """A schedule whose losses are scaled by what is in the list."""
    made = PipelineStage(stage, dist.get_rank(), RANKS, torch.device("cpu"))
    return SCHEDULES[kind](made, RANKS, loss_fn=lambda output, y: loss_of(output, y, len(y)) * scale[0])


def run(schedule: Any, batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    first, last = dist.get_rank() == 0, dist.get_rank() == RANKS - 1
    schedule.step(*((x,) if first else ()), **({"target": y} if last else {}))


def stages_by_hand(kind: str, level: str, steps: int) -> State:
    _, dtype, scale = LEVELS[level]
    stage = own_stage()
    weights = masters = dict(stage.named_parameters())
    runs = stage
    if dtype is not None and level != "model":
        masters = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        stage.to(dtype)
        round_into(weights, masters, level)
    if dtype is not None:
        runs = CastByHand(stage, dtype, casts_weights=level == "model")
    schedule, optimizer = schedule_of(kind, runs, [scale]), sgd(masters.values())
    for batch in batches(steps):
        for weight in weights.values():
            weight.grad = None
        run(schedule, batch)
        for weight, master in zip(weights.values(), masters.values(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.to(master.dtype) / scale
        optimizer.step()
        round_into(weights, masters, level)
    return full(masters)


def stages_as_by_hand(kind: str, level: str) -> None:
    by_hand = stages_by_hand(kind, level, 3)
    stage = own_stage()
    optimizer = sgd(stage.parameters())
    mpinit.initialize(stage, optimizer, verbosity=0, process_group=dist.group.WORLD, **LEVELS[level][0])
    scale: list[Any] = [1.0]
    schedule = schedule_of(kind, stage, scale)
    for batch in batches(3):
        optimizer.zero_grad()
        with mpinit.scale_loss(torch.ones(()), optimizer) as scale[0]:
            run(schedule, batch)
        optimizer.step()
    assert mpinit.step_counts(optimizer) == (3, 0)
    for name, value in full(stage.state_dict()).items():
        torch.testing.assert_close(value, by_hand[name], atol=0, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def fifty_steps_with_overflows_in_stages() -> None:
    stage = own_stage()
    optimizer = sgd(stage.parameters())
    given = {"init_loss_scale": 2.0**12, "process_group": dist.group.WORLD}
    mpinit.initialize(stage, optimizer, "O2", verbosity=0, **given)
    scale: list[Any] = [1.0]
    schedule, chance = schedule_of("1F1B", stage, scale), random.Random(dist.get_rank())
    before = full(stage.state_dict())
    for batch in batches(50):
        optimizer.zero_grad()
        with mpinit.scale_loss(torch.ones(()), optimizer) as scale[0]:
            run(schedule, batch)
            if chance.random() < 0.06:
                next(iter(stage.parameters())).grad.fill_(float("inf"))
        optimizer.step()
        known: list[Any] = [None] * RANKS
        skipped = bool(mpinit.step_was_skipped(optimizer))
        dist.all_gather_object(known, (mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer), skipped))
        assert known == [known[0]] * RANKS, known
        after = full(stage.state_dict())
        assert all(torch.equal(after[name], before[name]) for name in after) == skipped
        before = after
    assert 5 <= mpinit.step_counts(optimizer)[1] <= 45
