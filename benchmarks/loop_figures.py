"""Figures of loops: the time of each contender, divided by that of the hand-written loop with the same extra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .estimate import Estimate
from .loops import EXTRAS, LoopRow, loop_rows
from .results import Results

# The largest ratio of mpinit's time to that of the hand-written loop.
GOAL: Final = 1.05
HEAD: Final = ["a loop with", "", "level", "torch.amp", "mpinit", "mpinit split", f"at most {GOAL:.2f}"]


def rows(found: Mapping[str, Results]) -> list[list[str]]:
    """Return a row for each extra, task and level that was measured."""
    return [_row(extra, row, found[name]) for name, row in loop_rows().items() if name in found for extra in row.extras]


def _row(extra: str, row: LoopRow, results: Results) -> list[str]:
    level = row.level
    counterpart = f"{level.by_hand}+{EXTRAS[extra].counterpart or extra}"
    full, split = (*level.ours, "")[:2]
    amp = f"{level.amp}+{EXTRAS[extra].counterpart or extra}"
    names = [amp, f"{full}+{extra}", f"{split}+{extra}"]
    estimates = [results.ratio(name, counterpart) for name in names]
    title = [EXTRAS[extra].title, row.task.partition("_")[0], level.title]
    return [*title, *(str(estimate or "-") for estimate in estimates), _verdict(estimates[1:])]


def _verdict(estimates: list[Estimate | None]) -> str:
    medians = [estimate.median for estimate in estimates if estimate is not None]
    if not medians:
        return ""
    return "met" if round(max(medians), 2) <= GOAL else "not met"
