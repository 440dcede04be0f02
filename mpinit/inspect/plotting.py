"""Plots, where matplotlib is installed: it is asked for by name, when a plot is."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def new_figure(width: float, height: float, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure of ``rows`` axes below each other that share their x-axis, belonging to no window.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    figure = _empty_figure(width, height)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    return figure, list(axes)


def new_columns(width: float, height: float, ratios: Sequence[float]) -> tuple[Any, list[Any]]:
    """A figure of axes beside each other, as wide as these ratios say, belonging to no window.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    figure = _empty_figure(width, height)
    return figure, list(figure.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0])


def _empty_figure(width: float, height: float) -> Any:
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise RuntimeError("plots need matplotlib: pip install matplotlib, or mpinit[plot]") from error
    return figures.Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: str | Path | None) -> Any:
    """Write the figure to ``path`` (its ending tells how), where one is given; the figure."""
    if path is not None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=120)
    return figure
