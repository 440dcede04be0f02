"""The demo's plot: training loss and loss scale of every run, step by step, a column for each 16-bit type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from .training import Run

COLUMNS = {"fp16": "float16", "bf16": "bfloat16"}

# The curves lie on top of one another, which is the point of them: a wide pale line under ever thinner dashed ones, in
# colours that colour-blind readers can tell apart.
LOOKS: dict[str, dict[str, Any]] = {
    "O0": {"color": "#b8b8b8", "linewidth": 6.0, "solid_capstyle": "round"},
    "O1": {"color": "#0072b2", "linewidth": 2.4},
    "O2": {"color": "#d55e00", "linewidth": 2.0, "linestyle": (0, (4, 3))},
    "O3": {"color": "#009e73", "linewidth": 1.6, "linestyle": (0, (1.2, 1.6))},
}


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start; it ends where the values stop being finite."""
    smoothed, total = [], 0.0
    for number, value in enumerate(values, start=1):
        total = weight * total + (1 - weight) * value
        if not math.isfinite(total):
            break
        smoothed.append(total / (1 - weight**number))
    return smoothed


def draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    """Smoothed training loss, on a logarithmic axis; a dot where a run turned into nan, named below the axes."""
    for run in runs:
        curve, look = smooth(run.losses), LOOKS[run.setting.level]
        axes.plot(curve, label=run.setting.level, **look)
        if curve and run.diverged_at is not None:
            last, color = len(curve) - 1, look["color"]
            axes.plot(last, curve[-1], "o", color=color, zorder=3)
            axes.axvline(last, color=color, linewidth=0.8, linestyle=":", zorder=0)
            # Outside of the axes, where no curve can be.
            axes.text(
                *(last, -0.03, f"{run.setting.level}: nan from here"),
                transform=axes.get_xaxis_transform(),
                color=color,
                fontsize=9,
                va="top",
                ha="left" if last < len(run.losses) / 2 else "right",
            )
    axes.set_yscale("log")


def draw_scales(axes: Axes, runs: Sequence[Run]) -> None:
    """Loss scale in powers of two; a cross where a step was skipped."""
    skipped: list[tuple[int, float]] = []
    for run in runs:
        axes.plot(run.loss_scales, drawstyle="steps-post", **LOOKS[run.setting.level])
        skipped += [(step, run.loss_scales[step]) for step in run.skipped_steps]
    if skipped:
        axes.scatter(*zip(*skipped, strict=True), marker="x", s=45, color="#222222", zorder=3, label="skipped step")
        axes.legend(frameon=False, fontsize=9, loc="center right")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=2**4))
    axes.set_ylim(0.5, 2.0**25)
    axes.set_xlabel("training step")


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the plot to ``path``."""
    figure, grid = plt.subplots(
        2, 2, sharex=True, sharey="row", figsize=(11, 7), height_ratios=(3, 2), layout="constrained"
    )
    for (dtype, title), losses, scales in zip(COLUMNS.items(), *grid, strict=True):
        chosen = [run for run in runs if run.setting.dtype in ("fp32", dtype)]
        draw_losses(losses, chosen)
        draw_scales(scales, chosen)
        losses.set_title(title, loc="left", fontsize=11)
        for axes in (losses, scales):
            axes.grid(color="#e4e4e4", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("training loss (smoothed)")
    grid[1][0].set_ylabel("loss scale")
    grid[0][1].legend(frameon=False, fontsize=10)
    figure.suptitle("A CNN with BatchNorm on handwritten digits, O0 (float32) to O3", x=0.01, ha="left", fontsize=13)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
