"""Figures of the growth workloads: times by size, slopes, and the cost of one more module, tensor or optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .estimate import Estimate, of_process, over_processes, seconds
from .growth import AXES
from .results import Results

# The slope is that of the last points: at small sizes fixed costs hide it.
LAST = 3


def points(results: Results) -> list[int]:
    """Return the points that were measured."""
    return [int(name) for name in results.workload.contenders if name.isdigit() and results.rounds(name)]


def step_seconds(results: Results) -> list[Estimate]:
    """Return the time of mpinit's part of a step, point by point."""
    return [seconds(results.rounds(str(point))) for point in points(results)]


def initialize_seconds(results: Results) -> list[Estimate]:
    """Return the time of ``initialize``, point by point."""
    return [over_processes(results.fact(str(point), "initialize_s")) for point in points(results)]


def slope(at: Sequence[int], times: Sequence[float]) -> float:
    """Return the exponent of the growth over the last points: 1 is linear, 0 flat."""
    x, y = [math.log(n) for n in at[-LAST:]], [math.log(t) for t in times[-LAST:]]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - middle_x) ** 2 for a in x)


def step_slope(results: Results) -> Estimate:
    """Return the slope of a step, over the rounds."""
    at = points(results)
    columns = [results.rounds(str(point)) for point in at]
    common = sorted(set.intersection(*(set(column) for column in columns)))
    return over_processes([slope(at, [of_process(column[number]) for column in columns]) for number in common])


def initialize_slope(results: Results) -> Estimate:
    """Return the slope of ``initialize``, over the rounds."""
    at = points(results)
    rows = zip(*(results.fact(str(point), "initialize_s") for point in at), strict=False)
    return over_processes([slope(at, row) for row in rows])


def row(results: Results) -> list[str]:
    """Return a row of the table."""
    at, axis = points(results), AXES[results.name.removeprefix("grow_")]
    ends = f"{at[0]:,}, {at[-1]:,}"
    resident = max(results.fact(str(at[-1]), "resident_bytes")) / 1e6
    last = step_seconds(results)[-1]
    each = "-" if axis.flat else f"{last.median / at[-1] * 1e6:.3g}"
    built = "-" if results.name == "grow_steps" else str(initialize_slope(results))
    return [axis.title, ends, str(step_slope(results)), built, f"{last.median * 1e3:.3g}", each, f"{resident:,.0f}"]
