"""What values from several processes say: a median, an interval for it, and whether anything can be said at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

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


def over_processes(values: Sequence[float]) -> Estimate:
    """The median of one value a process and its 95 % interval."""
    return over_turns([[value] for value in values])


def over_turns(processes: Sequence[Sequence[float]]) -> Estimate:
    """The median of all turns, and its 95 % interval by drawing as many processes again, each with all of its turns."""
    return _over_turns(tuple(tuple(turns) for turns in processes))


@lru_cache(maxsize=4096)
def _over_turns(processes: tuple[tuple[float, ...], ...]) -> Estimate:
    pairs = sorted((value, number) for number, turns in enumerate(processes) for value in turns)
    values = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
    owners = torch.tensor([number for _, number in pairs])
    count = len(processes)
    drawn = torch.randint(count, (_RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    # How often each process was drawn, and with it each of its turns; all of them once, first. Then, in order of value,
    # where half of them are reached.
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
    """Time of one contender."""
    return over_processes([of_process(values) for values in rounds.values()])


def ratio(above: Rounds, below: Rounds) -> Estimate:
    """Time over time, within each turn: what slows the machine down slows both down."""
    common = sorted(above.keys() & below.keys())
    return over_turns(
        [[one / other for one, other in zip(above[number], below[number], strict=False)] for number in common]
    )


def holds(control: Estimate) -> bool:
    """Whether a control's interval lies within the limits."""
    return CONTROL_LIMITS[0] <= control.low and control.high <= CONTROL_LIMITS[1]
