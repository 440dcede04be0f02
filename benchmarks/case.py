"""What one process measures: prepared untimed, run again and again, and asked for its other figures at the end."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

Facts = dict[str, float | int | str]


class Case(ABC):
    """One contender of one workload, in the process that measures it."""

    @abstractmethod
    def prepare(self) -> None:
        """Build and warm up; nothing of it is timed."""

    @abstractmethod
    def seconds(self, loops: int) -> float:
        """What ``loops`` repetitions take."""

    @abstractmethod
    def facts(self, first: bool) -> Facts:
        """What else there is to know once the times are taken: bytes, counts.

        Args:
            first: of this contender's processes; what is alike in all of them is found out once.
        """


class Unavailable(Exception):
    """The contender has no part in this run: a package, a device or a rule is missing. Says which."""


def clock_for(device: str) -> Callable[[], float]:
    """Seconds of this process: its CPU time, or on CUDA the time on the wall with all work done.

    CPU time leaves out what other programs took; with one thread it is otherwise the time on the wall.
    """
    if device == "cuda":
        return _cuda_now
    return time.process_time


def _cuda_now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
