"""Memory of a training: bytes by kind, and the peak of steps."""

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


def bytes_by_kind(contender: Contender) -> dict[str, int]:
    """Count the bytes of all live tensors, by kind.

    Weights are the model's parameters and buffers, gradients are all ``.grad``, states are the optimizer's. Masters are
    all other tensors: full masters, remainders of split masters, and anything else that is kept for them. The tensors
    of the benchmark itself are not counted. A storage counts once, for the first kind that has it.
    """
    gc.collect()
    task = contender.task
    seen: set[int] = set()
    _count([*task.fixtures(), *(tensor for batch in task.batches for tensor in batch)], seen)
    parameters = [*contender.model.parameters(), *contender.gradient_carriers()]
    weights = _count([*contender.model.parameters(), *contender.model.buffers()], seen)
    gradients = _count((p.grad for p in parameters if p.grad is not None), seen)
    states = _count((value for state in contender.states() for value in _leaves(state)), seen)
    return {"weights": weights, "masters": _count(_live(), seen), "gradients": gradients, "states": states}


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


def _count(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Return the bytes of the tensors' storages, without those in ``seen``, and add them to ``seen``."""
    total = 0
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            # For a DTensor the names include its mesh, which is no tensor.
            total += _count(_leaves([getattr(tensor, name) for name in names]), seen)
            continue
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or tensor.layout is not torch.strided:
            continue
        address, size = _memory(tensor)
        if not size and type(tensor) is not Tensor:
            # A wrapper class, whose numbers are in tensors among its attributes.
            total += _count(_leaves(vars(tensor)), seen)
        if size and address not in seen:
            seen.add(address)
            total += size
    return total


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return the address and size of a tensor's storage; (0, 0) if it has none, as a compiler's fake tensors."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, ValueError):
        return 0, 0


@dataclass(frozen=True)
class Level:
    """The allocated bytes at the start of a stage and at its peak, counted from the start of the first stage."""

    start: int
    peak: int


def trace(stages: Sequence[Callable[[], Any]], device: torch.device) -> list[Level]:
    """Run stages one after the other, and follow the memory that they allocate and free.

    The CPU's allocator has no peak counter, so torch's profiler records each allocation and release. It records the
    release only of memory whose allocation it has recorded: a stage may free only what one of the stages has allocated.
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
    """Yield the level of each stage, from (time, change of the allocated bytes) and the times at which stages begin."""
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
_RESET_PEAK: Final = Path("/proc/self/clear_refs")


def return_freed_memory() -> None:
    """Make the allocator return blocks of 64 KiB or more to the system when they are freed.

    An allocator that keeps freed blocks makes the process look larger than its live tensors. If the C library has no
    such settings, nothing changes.
    """
    settings = {_MMAP_THRESHOLD: 1 << 16, _MMAP_MAX: 1 << 20, _TRIM_THRESHOLD: 1 << 17, _TOP_PAD: 0}
    setter = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, value in settings.items() if setter is not None else ():
        setter(name, value)


def trim_heap() -> None:
    """Return freed memory to the system now, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def bytes_now(device: torch.device) -> int:
    """Return the memory of the process: CUDA's own count, or on Linux the system's, without libraries' files."""
    _free_unused(device)
    return torch.cuda.memory_allocated() if device.type == "cuda" else _status("RssAnon")


def peak_of(work: Callable[[], Any], device: torch.device) -> int | None:
    """Return the largest memory of the process while ``work`` runs, counted as :func:`bytes_now` counts.

    Returns:
        The bytes; None if the system has no peak counter that can be reset.
    """
    _free_unused(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    try:
        _RESET_PEAK.write_text("5")
    except OSError:
        return None
    work()
    return _status("VmHWM") - _status("RssFile") - _status("RssShmem")


def resident_bytes() -> int:
    """Return the memory of this process by the system's count, with libraries' files; 0 if the system has no count."""
    return _status("VmRSS")


def _free_unused(device: torch.device) -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif trim is not None:
        trim(0)


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s*(\d+)", _STATUS.read_text()) if _STATUS.exists() else None
    return int(found.group(1)) * 1024 if found else 0
