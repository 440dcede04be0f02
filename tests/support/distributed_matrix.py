"""Every engine at every level, beside a loop by hand on the same engine, in four processes; see distributed_launch.

Every run has each engine at one of its levels, in turn, and where it is refused, and the simplest engines at all
levels. ``pytest -m nightly`` has the rest.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import distributed_pipeline as pipeline
import distributed_uneven as uneven
import torch
import torch.distributed as dist
from distributed_by_hand import cycles, pair, passes, trained, trained_by_hand
from distributed_engines import ENGINES, mesh
from distributed_replicas import refused
from torch import Tensor
from torch.distributed.tensor import DTensor

import mpinit

STEPS = 3
CHECKS: dict[str, Callable[[], None]] = {}
NIGHTLY: dict[str, Callable[[], None]] = {}
AT_ALL_LEVELS = ("ddp", "fsdp by layer")


def as_by_hand(name: str, level: str) -> None:
    """Bit for bit, or refused by name."""
    engine = ENGINES[name]
    if level in engine.refused:
        with refused(ValueError, *engine.refused[level]):
            trained(engine, level, STEPS)
        return
    state = trained(engine, level, STEPS)
    by_hand = trained_by_hand(engine, level, STEPS)
    start = dict(engine.network().named_parameters())
    assert {value.dtype for value in state.values()} == {torch.float32}
    for key, value in by_hand.items():
        assert not torch.equal(value, start[key]), f"{key} is not trained at all"
        torch.testing.assert_close(state[key], value, atol=0, rtol=0, msg=lambda text, key=key: f"{key}: {text}")
    assert_one(list(state.values()), dist.group.WORLD)


def random_overflows(name: str, level: str, steps: int) -> None:
    """Every rank overflows by itself now and then: all skip then, and stay one."""
    engine = ENGINES[name]
    runs, model, optimizer = pair(engine, level, loss_scale="dynamic", init_loss_scale=2.0**12)
    group = mesh(2, 2).get_group("outer") if name == "hsdp" else dist.group.WORLD
    chance = random.Random(dist.get_rank())
    for micros in cycles(engine, steps):
        optimizer.zero_grad()
        for loss in passes(engine, runs, micros):
            factor = float("inf") if chance.random() < 0.06 else 1.0
            with mpinit.scale_loss(loss * factor, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        done, skipped = mpinit.step_counts(optimizer)
        known = [mpinit.loss_scale(optimizer), done, skipped, mpinit.step_was_skipped(optimizer)]
        assert_one([torch.tensor(known)], dist.group.WORLD)
        if name.startswith("ddp") or name == "hsdp":
            masters: Sequence[Any] = list(model.state_dict().values())
            assert_one([master.to_local() if isinstance(master, DTensor) else master for master in masters], group)
    assert skipped >= steps // 10
    assert done >= steps // 10


def assert_one(tensors: Sequence[Tensor], group: Any) -> None:
    flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, flat, group=group)
    assert all(torch.equal(gathered[0], other) for other in gathered[1:]), "ranks have parted"


def fifty_steps_with_overflows(name: str, level: str) -> None:
    random_overflows(name, level, 50)


def twenty_steps_with_overflows(name: str, level: str) -> None:
    random_overflows(name, level, 20)


def enter(check: Callable[..., None], *cases: Sequence[str], into: dict[str, Callable[[], None]] = CHECKS) -> None:
    for case in cases or ((),):
        into["-".join([check.__name__, *case]).replace(" ", "_")] = functools.partial(check, *case)


def enter_engines() -> None:
    for index, (name, engine) in enumerate(ENGINES.items()):
        works = [level for level in engine.levels if level not in engine.refused]
        tonight = set() if name in AT_ALL_LEVELS else {*works} - {works[index % len(works)]}
        for level in engine.levels:
            enter(as_by_hand, (name, level), into=NIGHTLY if level in tonight else CHECKS)


enter_engines()
enter(fifty_steps_with_overflows, *[("ddp", level) for level in ("O2", "split", "model")])
enter(twenty_steps_with_overflows, ("hsdp", "O2"), ("tp fsdp", "O2"))
enter(fifty_steps_with_overflows, ("hsdp", "O2"), ("tp fsdp", "O2"), into=NIGHTLY)
enter(pipeline.stages_as_by_hand, *pipeline.CASES)
enter(pipeline.fifty_steps_with_overflows_in_stages)
enter(uneven.a_rank_without_a_batch_ends_with_the_others_masters, ("O1",), ("O2",), ("split",), ("model",))
enter(uneven.what_one_rank_has_loaded_reaches_all, ("O2",), ("split",), ("model",))
enter(uneven.averages_of_masters_are_one, ("O0",), ("O2",), ("split",), ("model",))
enter(uneven.zero_redundancy_without_masters, ("O1",), ("model",))
enter(uneven.memory_after_initialize)
