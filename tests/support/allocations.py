"""Allocated bytes while functions run, one after the other, on a CPU."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Level:
    """The allocated bytes at the start of a stage and at its peak, counted from the start of the first stage."""

    start: int
    peak: int


def trace(stages: Sequence[Callable[[], Any]]) -> list[Level]:
    """Follow the memory that stages allocate and free, by torch's profiler.

    It records the release only of memory whose allocation it has recorded.
    """
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
