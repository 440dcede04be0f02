"""Bytes: what is held, by kind, and what a step takes at its peak."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

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


def all_held() -> int:
    """Bytes of every live tensor."""
    gc.collect()
    return _take(_live(), set())


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
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            continue
        address, size = _memory(tensor)
        if size and address not in seen:
            seen.add(address)
            total += size
    return total


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Address and size of a tensor's memory; a compiler's stand-in tensors have none."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return 0, 0


def rise(work: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that ``work`` held at once beyond what was held before it."""
    return _cuda_rise(work) if device.type == "cuda" else _cpu_rise(work)


def _cuda_rise(work: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cpu_rise(work: Callable[[], Any]) -> int:
    """The CPU's allocator keeps no peak, but the profiler writes down each of its allocations and releases."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    results: Any = profile.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
