"""Counts of one step: operations dispatched, kernels started, host syncs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def dispatched_ops(work: Callable[[], Any]) -> int:
    """Count the operators that reach the dispatcher during ``work``, views included."""
    counter = _Counter()
    with counter:
        work()
    return counter.count


def kernels(work: Callable[[], Any]) -> int:
    """Count the kernels, copies and fills that run on the CUDA device during ``work``."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in recorded.events() or ())


def host_syncs(work: Callable[[], Any]) -> int:
    """Count how often ``work`` makes the host wait for the CUDA device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
