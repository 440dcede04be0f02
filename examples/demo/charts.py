"""The demo's plot: training loss and loss scale of every run, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .training import Run

# A palette that also works for colour-blind readers; the level is the colour, the 16-bit type the line's style.
COLOURS = {"O0": "#222222", "O1": "#0072b2", "O2": "#d55e00", "O3": "#009e73"}
STYLES = {"fp32": "-", "fp16": "-", "bf16": (0, (4, 2))}


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start, so that seven noisy curves can be told apart."""
    smoothed, total = [], 0.0
    for number, value in enumerate(values, start=1):
        total = weight * total + (1 - weight) * value
        smoothed.append(total / (1 - weight**number))
    return smoothed


def draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    """Smoothed training loss, on a logarithmic axis."""
    for run in runs:
        axes.plot(smooth(run.losses), label=run.setting.name, **look(run))
    axes.set_yscale("log")
    axes.set_ylabel("training loss (smoothed)")
    axes.legend(ncols=2, frameon=False, fontsize=9)


def draw_scales(axes: Axes, runs: Sequence[Run]) -> None:
    """Loss scale in powers of two; a cross where a step was skipped."""
    crosses = None
    for run in runs:
        axes.plot(run.loss_scales, drawstyle="steps-post", **look(run))
        if run.skipped_steps:
            heights = [run.loss_scales[step] for step in run.skipped_steps]
            crosses = axes.scatter(run.skipped_steps, heights, marker="x", s=40, color=look(run)["color"], zorder=3)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")
    axes.set_xlabel("training step")
    if crosses is not None:
        axes.legend([crosses], ["skipped step"], frameon=False, fontsize=9, loc="center right")


def look(run: Run) -> dict[str, object]:
    """Colour and line style of a run."""
    width = 2.2 if run.setting.level == "O0" else 1.4
    return {"color": COLOURS[run.setting.level], "linestyle": STYLES[run.setting.dtype], "linewidth": width}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the plot to ``path``."""
    figure, (losses, scales) = plt.subplots(
        2, 1, sharex=True, figsize=(9, 7), height_ratios=(3, 2), layout="constrained"
    )
    draw_losses(losses, runs)
    draw_scales(scales, runs)
    for axes in (losses, scales):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Handwritten digits at every opt_level", x=0.01, ha="left", fontsize=13)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
