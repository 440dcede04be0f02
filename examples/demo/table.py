"""The demo's closing table."""

from __future__ import annotations

from collections.abc import Sequence

from .training import Run

HEADINGS = ("level", "dtype", "test accuracy", "time", "weights", "optimizer", "skipped steps", "final loss scale")


def table(runs: Sequence[Run]) -> str:
    """One aligned row for each run."""
    rows = [HEADINGS, *(row(run) for run in runs)]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def row(run: Run) -> tuple[str, ...]:
    """One run's cells."""
    return (
        run.setting.level,
        run.setting.dtype,
        f"{100 * run.accuracy:.1f} %",
        f"{run.seconds:.1f} s",
        f"{run.weight_bytes:,} B",
        f"{run.optimizer_bytes:,} B",
        str(len(run.skipped_steps)),
        f"{run.loss_scales[-1]:,.0f}" if run.loss_scales[-1] >= 1 else f"{run.loss_scales[-1]:g}",
    )


def remarks(runs: Sequence[Run]) -> list[str]:
    """How far each O1 and O2 run's test accuracy is from O0's, and which runs broke down."""
    lines = []
    reference = next((run.accuracy for run in runs if run.setting.level == "O0"), None)
    for run in runs:
        if reference is not None and run.setting.level in ("O1", "O2"):
            lines.append(f"{run.setting.name}: {100 * (run.accuracy - reference):+.1f} points from O0")
        if run.diverged_at is not None:
            lines.append(
                f"{run.setting.name}: the loss is nan from step {run.diverged_at} on; without float32 masters the "
                "optimizer's own arithmetic is 16-bit"
            )
    return lines
