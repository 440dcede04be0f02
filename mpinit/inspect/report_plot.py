"""A precision report as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from .findings import VIEWS, Findings, name_of
from .footprint import KINDS
from .plotting import new_columns, save

_DTYPE_COLOURS: Final = {
    "float32": "#3567b0",
    "float16": "#d1711b",
    "bfloat16": "#2a8f7a",
    "casts and mixed": "#8b7bb8",
}
_KIND_COLOURS: Final = ("#3567b0", "#8fb3e0", "#d9a441", "#9a8f80")
_MOST_MODULES: Final = 24


def plot(report: Findings, path: str | Path | None = None) -> Any:
    """Bytes a parameter on the left, dtypes of every module's operations on the right.

    Args:
        report: what to draw; of more than 24 modules, those with the most operations.
        path: a file to write it to as well; its ending tells how. Default none.
    """
    shares = _shares(report)
    figure, (memory, modules) = new_columns(11, max(3.6, 1.6 + 0.24 * len(shares)), (2, 3))
    _draw_memory(memory, report)
    _draw_shares(modules, shares)
    figure.suptitle(f"{report.title()}", fontsize=11)
    return save(figure, path)


def _draw_memory(axes: Any, report: Findings) -> None:
    levels = list(report.bytes_per_parameter)
    bottom = [0.0] * len(levels)
    for kind, colour in zip(KINDS, _KIND_COLOURS, strict=True):
        heights = [report.bytes_per_parameter[level][kind] for level in levels]
        axes.bar(levels, heights, bottom=bottom, color=colour, label=kind, width=0.7)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for index, total in enumerate(bottom):
        axes.text(index, total, f"{total:.3g}", ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.35 * max([1.0, *bottom]))
    axes.set_ylabel("bytes a parameter")
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_shares(axes: Any, shares: dict[str, dict[str, int]]) -> None:
    names = list(shares)
    left = [0] * len(names)
    for dtype, colour in _DTYPE_COLOURS.items():
        widths = [shares[name][dtype] for name in names]
        if any(widths):
            axes.barh(names, widths, left=left, color=colour, label=dtype, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("operations on floating numbers, views aside")
    axes.tick_params(axis="y", labelsize=8)
    if names:
        axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _shares(report: Findings) -> dict[str, dict[str, int]]:
    """Module -> dtype -> how many operations."""
    found: dict[str, dict[str, int]] = {}
    for row in report.rows:
        if row.dtypes and row.op not in VIEWS:
            counts = found.setdefault(name_of(row), dict.fromkeys(_DTYPE_COLOURS, 0))
            (alone,) = row.dtypes if len(row.dtypes) == 1 else ("",)
            counts[alone if alone in counts else "casts and mixed"] += row.count
    largest = sorted(found, key=lambda name: -sum(found[name].values()))[:_MOST_MODULES]
    return {name: counts for name, counts in found.items() if name in largest}
