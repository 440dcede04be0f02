"""The interface of everything that a process can measure."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

Facts = dict[str, float | int | str]


class Case(ABC):
    """One contender of one workload, in the process that measures it: prepared once, timed many times."""

    @abstractmethod
    def prepare(self) -> None:
        """Build and warm up, untimed."""

    @abstractmethod
    def seconds(self, loops: int) -> float:
        """Return the time of ``loops`` repetitions together."""

    @abstractmethod
    def facts(self, first: bool) -> Facts:
        """Return the other figures, such as bytes and counts; called once, after the last repetition.

        Args:
            first: whether this is the contender's first process. Figures that are the same in all of them are returned
                by the first only.
        """


class Unavailable(Exception):
    """A contender cannot be measured here; the message names the package, device or rule that is missing."""


def clock_for(device: str) -> Callable[[], float]:
    """Return a clock in seconds: the CPU time of this process, or on CUDA the wall time after a device sync.

    CPU time does not count other programs. With one thread it is the wall time otherwise.
    """
    if device == "cuda":
        return _cuda_now
    return time.process_time


def _cuda_now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
