"""Time per step and its split: the host's clock on CPU, events on the stream on CUDA."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import fmean

import torch

PHASES = ("forward", "backward", "step")


class CpuClock:
    """Marks are the host's time."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []

    def start_step(self) -> None:
        self.steps.append([])
        self.mark()

    def mark(self) -> None:
        self.steps[-1].append(time.perf_counter() * 1e3)

    def phases(self) -> dict[str, float]:
        """Mean milliseconds per phase."""
        lengths = [[after - before for before, after in pairwise(s)] for s in self.steps]
        return _by_phase(lengths)

    def now(self) -> float:
        """Milliseconds, with all work done."""
        return time.perf_counter() * 1e3


class CudaClock:
    """Marks are events: they cost the host a few microseconds and never make it wait."""

    def __init__(self) -> None:
        self.steps: list[list[torch.cuda.Event]] = []

    def start_step(self) -> None:
        self.steps.append([])
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.steps[-1].append(event)

    def phases(self) -> dict[str, float]:
        """Mean milliseconds per phase; call it after ``now``."""
        lengths = [[before.elapsed_time(after) for before, after in pairwise(s)] for s in self.steps]
        return _by_phase(lengths)

    def now(self) -> float:
        """Milliseconds, with all work done."""
        torch.cuda.synchronize()
        return time.perf_counter() * 1e3


def _by_phase(lengths: list[list[float]]) -> dict[str, float]:
    return {name: fmean(column) for name, column in zip(PHASES, zip(*lengths, strict=True), strict=True)}


def make_clock(device: torch.device) -> CpuClock | CudaClock:
    """The clock for a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()
