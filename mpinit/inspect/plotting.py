"""Plots, where matplotlib is installed: it is asked for by name, when a plot is."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def new_figure(width: float, height: float, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure of ``rows`` axes below each other that share their x-axis, belonging to no window.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise RuntimeError("plots need matplotlib: pip install matplotlib") from error
    figure = figures.Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    return figure, list(axes)


def save(figure: Any, path: str | Path | None) -> Any:
    """Write the figure to ``path`` (its ending tells how), where one is given; the figure."""
    if path is not None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=120)
    return figure
