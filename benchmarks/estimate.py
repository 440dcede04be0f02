"""Statistics of times from several processes: medians, bootstrap intervals, and the check of controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

# A control compares two contenders that do the same work: its interval has to lie within these limits.
CONTROL_LIMITS: Final = (0.97, 1.03)
_RESAMPLES: Final = 2000
_TAIL: Final = 0.025

# A round -> the seconds of each turn of one contender's process in it.
Rounds = Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Estimate:
    """A median over processes with its bootstrap interval."""

    median: float
    low: float
    high: float

    def times(self, factor: float) -> Estimate:
        """Return the estimate in another unit."""
        return Estimate(self.median * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def of_process(values: Sequence[float]) -> float:
    """Return one number for a process: its fastest turn, which other programs disturbed least."""
    return min(values)


def over_processes(values: Sequence[float]) -> Estimate:
    """Return the median of one value per process, and its 95 % interval."""
    return over_turns([[value] for value in values])


def over_turns(processes: Sequence[Sequence[float]]) -> Estimate:
    """Return the median of all turns, and its 95 % interval by bootstrap over processes, each with all its turns."""
    return _over_turns(tuple(tuple(turns) for turns in processes))


@lru_cache(maxsize=4096)
def _over_turns(processes: tuple[tuple[float, ...], ...]) -> Estimate:
    pairs = sorted((value, number) for number, turns in enumerate(processes) for value in turns)
    values = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
    owners = torch.tensor([number for _, number in pairs])
    count = len(processes)
    drawn = torch.randint(count, (_RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    # How often each process was drawn, and with it each of its turns. The first row has every process once. The median
    # of a row is the value at which half of its draws are reached, in order of value.
    times = torch.zeros(1 + _RESAMPLES, count, dtype=torch.long).scatter_add_(
        1, torch.cat([torch.arange(count)[None], drawn]), torch.ones(1 + _RESAMPLES, count, dtype=torch.long)
    )
    reached = times[:, owners].cumsum(1)
    low, high = 2 * reached >= reached[:, -1:], 2 * reached > reached[:, -1:]
    both = (values[low.int().argmax(1)] + values[high.int().argmax(1)]) / 2
    medians = both[1:].sort().values
    tail = int(_TAIL * _RESAMPLES)
    return Estimate(both[0].item(), medians[tail].item(), medians[-1 - tail].item())


def seconds(rounds: Rounds) -> Estimate:
    """Return the time of one contender."""
    return over_processes([of_process(values) for values in rounds.values()])


def ratio(above: Rounds, below: Rounds) -> Estimate:
    """Return the ratio of two contenders' times, turn by turn: a slower machine slows both."""
    common = sorted(above.keys() & below.keys())
    return over_turns(
        [[one / other for one, other in zip(above[number], below[number], strict=False)] for number in common]
    )


def is_within_limits(control: Estimate) -> bool:
    """Return whether a control's interval lies within the limits."""
    return CONTROL_LIMITS[0] <= control.low and control.high <= CONTROL_LIMITS[1]
