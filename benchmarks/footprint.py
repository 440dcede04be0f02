"""Bytes: what is held, by kind, and what steps take at their peak."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
    states = _take((value for state in contender.states() for value in _leaves(state)), seen)
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
            # A DTensor names its mesh there, too.
            total += _take(_leaves([getattr(tensor, name) for name in names]), seen)
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


# The C library's own numbers of its settings.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_STATUS: Final = Path("/proc/self/status")
_FORGET_PEAK: Final = Path("/proc/self/clear_refs")


def give_back_what_is_freed() -> None:
    """From here on blocks of 64 KiB or more go back to the system when they are freed: what is held is what is alive.

    An allocator that keeps them shows what was freed long ago as held. Where the C library has no such settings,
    nothing changes.
    """
    settings = {_MMAP_THRESHOLD: 1 << 16, _MMAP_MAX: 1 << 20, _TRIM_THRESHOLD: 1 << 17, _TOP_PAD: 0}
    setter = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, value in settings.items() if setter is not None else ():
        setter(name, value)


def trim_heap() -> None:
    """Give back to the system now what was freed, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def held_now(device: torch.device) -> int:
    """Bytes that the process holds: CUDA's own count, or on Linux the system's, without libraries' files."""
    _let_go(device)
    return torch.cuda.memory_allocated() if device.type == "cuda" else _status("RssAnon")


def peak_of(work: Callable[[], Any], device: torch.device) -> int | None:
    """The most that the process holds while ``work`` runs, counted as :func:`held_now` does.

    Returns:
        None where the system keeps no peak that can be set back.
    """
    _let_go(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    try:
        _FORGET_PEAK.write_text("5")
    except OSError:
        return None
    work()
    return _status("VmHWM") - _status("RssFile") - _status("RssShmem")


def resident_bytes() -> int:
    """What this process holds, files of libraries included, by the system's count; 0 where none is kept."""
    return _status("VmRSS")


def _let_go(device: torch.device) -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif trim is not None:
        trim(0)


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s*(\d+)", _STATUS.read_text()) if _STATUS.exists() else None
    return int(found.group(1)) * 1024 if found else 0
