"""What values from several processes say: a median, an interval for it, and whether anything can be said at all."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Final

# Where nothing differs, the interval has to lie within these.
CONTROL_LIMITS: Final = (0.97, 1.03)
_RESAMPLES: Final = 2000
_TAIL: Final = 0.025

# By round, the seconds that one process took in each of its turns.
Rounds = Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Estimate:
    """A median over processes with its bootstrap interval."""

    median: float
    low: float
    high: float

    def times(self, factor: float) -> Estimate:
        """In another unit."""
        return Estimate(self.median * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def of_process(values: Sequence[float]) -> float:
    """One number for a process: the turn that was disturbed least."""
    return min(values)


def of_processes(above: Sequence[float], below: Sequence[float]) -> float:
    """One ratio for two processes that took turns: the median of those of each turn."""
    return median(one / other for one, other in zip(above, below, strict=False))


def over_processes(values: Sequence[float]) -> Estimate:
    """The median and its 95 % interval, by drawing as many processes again with replacement."""
    return _over_processes(tuple(values))


@lru_cache(maxsize=4096)
def _over_processes(values: tuple[float, ...]) -> Estimate:
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return Estimate(median(values), medians[int(_TAIL * _RESAMPLES)], medians[-1 - int(_TAIL * _RESAMPLES)])


def seconds(rounds: Rounds) -> Estimate:
    """Time of one contender."""
    return over_processes([of_process(values) for values in rounds.values()])


def ratio(above: Rounds, below: Rounds) -> Estimate:
    """Time over time, within each turn: what slows the machine down slows both down."""
    common = sorted(above.keys() & below.keys())
    return over_processes([of_processes(above[number], below[number]) for number in common])


def holds(control: Estimate) -> bool:
    """Whether a control's interval lies within the limits."""
    return CONTROL_LIMITS[0] <= control.low and control.high <= CONTROL_LIMITS[1]
