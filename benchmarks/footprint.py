"""Bytes: what is held, by kind, and what a step takes at its peak."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .contenders import Contender

KINDS = ("weights", "masters", "gradients", "states")


def held(contender: Contender) -> dict[str, int]:
    """Bytes held between two verbs, by kind.

    Weights are the model's parameters and buffers, gradients every ``.grad``, states the optimizer's. Masters are
    what remains of all live tensors: full masters, remainders of split ones, and anything else kept for them. The
    benchmark's own tensors are left out; a storage counts once, for the first kind that holds it.
    """
    gc.collect()
    task = contender.task
    seen: set[int] = set()
    _take([*task.fixtures(), *(tensor for batch in task.batches for tensor in batch)], seen)
    parameters = [*contender.model.parameters(), *contender.gradient_carriers()]
    weights = _take([*contender.model.parameters(), *contender.model.buffers()], seen)
    gradients = _take((p.grad for p in parameters if p.grad is not None), seen)
    states = _take((value for state in contender.optimizer.state.values() for value in _leaves(state)), seen)
    return {"weights": weights, "masters": _take(_live(), seen), "gradients": gradients, "states": states}


def _live() -> Iterator[Tensor]:
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            yield thing


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


def _take(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages not seen before, which then are."""
    total = 0
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            total += _take((getattr(tensor, name) for name in names), seen)
            continue
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or tensor.layout is not torch.strided:
            continue
        address, size = _memory(tensor)
        if not size and type(tensor) is not Tensor:
            # One that stands for numbers kept in other tensors of its own.
            total += _take(_leaves(vars(tensor)), seen)
        if size and address not in seen:
            seen.add(address)
            total += size
    return total


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Address and size of a tensor's memory; a compiler's stand-ins and what is to be made later have none."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, ValueError):
        return 0, 0


@dataclass(frozen=True)
class Level:
    """Bytes held at the start of a stage and at its highest, counted from the start of the first stage."""

    start: int
    peak: int


def trace(stages: Sequence[Callable[[], Any]], device: torch.device) -> list[Level]:
    """Run stages one after the other and follow what they hold.

    The CPU's allocator keeps no peak, but the profiler writes down each allocation and release, the latter only of
    memory that it saw allocated: what a stage frees must have come from one of the stages.
    """
    gc.collect()
    return _cuda_trace(stages) if device.type == "cuda" else _cpu_trace(stages)


def _cuda_trace(stages: Sequence[Callable[[], Any]]) -> list[Level]:
    torch.cuda.synchronize()
    zero = torch.cuda.memory_allocated()
    levels = []
    for stage in stages:
        start = torch.cuda.memory_allocated() - zero
        torch.cuda.reset_peak_memory_stats()
        stage()
        torch.cuda.synchronize()
        levels.append(Level(start, torch.cuda.max_memory_allocated() - zero))
    return levels


def _cpu_trace(stages: Sequence[Callable[[], Any]]) -> list[Level]:
    names = [f"stage {index}" for index in range(len(stages))]
    activities = [torch.profiler.ProfilerActivity.CPU]
    # acc_events: or torch before 2.13 warns that it drops what earlier cycles recorded, also where there is one only.
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        for name, stage in zip(names, stages, strict=True):
            with torch.profiler.record_function(name):
                stage()
    results: Any = profile.profiler.kineto_results
    events = results.events()
    begins = {event.name(): event.start_ns() for event in events if event.name() in names}
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return list(_levels(changes, [begins[name] for name in names]))


def _levels(changes: list[tuple[int, int]], begins: list[int]) -> Iterator[Level]:
    """Start and peak between each two of ``begins``, from (time, change of the bytes held)."""
    now = 0
    for begin, end in zip(begins, [*begins[1:], sys.maxsize], strict=True):
        start = peak = now
        for _, change in (each for each in changes if begin <= each[0] < end):
            now += change
            peak = max(peak, now)
        yield Level(start, peak)
