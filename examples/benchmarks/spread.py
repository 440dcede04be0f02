"""Medians with their interquartile range, and ratios taken within each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}-{self.high:.2f}]"


def of(values: Sequence[float]) -> Spread:
    """Median and quartiles of some values."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high)


def phase(row: dict[str, Any], name: str) -> list[float]:
    """A contender's milliseconds per step in each round: "total", "forward", "backward" or "step"."""
    return [turn[name] for turn in row["turns_ms"]]


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Ratio within each round, so that a machine that slows down slows both sides."""
    return of([a / b for a, b in zip(above, below, strict=True)])
