"""The demo's tables, and what they say."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .network import digits_net
from .training import Run

HEADINGS = ("level", "dtype", "test accuracy", "time", "weights", "optimizer", "skipped steps", "final loss scale")


def table(runs: Sequence[Run]) -> str:
    """One aligned row for each run."""
    return aligned([HEADINGS, *(row(run) for run in runs)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Headings, a line, and rows, each column as wide as its widest cell."""
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def row(run: Run) -> tuple[str, ...]:
    """One run's cells."""
    return (
        run.setting.level,
        run.setting.dtype,
        "nan" if run.diverged_at is not None else f"{100 * run.accuracy:.1f} %",
        f"{run.seconds:.1f} s",
        f"{run.weight_bytes:,} B",
        f"{run.optimizer_bytes:,} B",
        str(len(run.skipped_steps)),
        f"{run.loss_scales[-1]:,.0f}" if run.loss_scales[-1] >= 1 else f"{run.loss_scales[-1]:g}",
    )


def remarks(runs: Sequence[Run], tested: int) -> list[str]:
    """What can be read from the accuracies, and which runs broke down."""
    whole = [run for run in runs if run.diverged_at is None]
    lines = []
    if whole:
        worst = min(run.accuracy for run in whole)
        # Wilson's interval, which does not shrink to nothing near 100 %.
        share, z = worst, 1.96
        half = z * math.sqrt(share * (1 - share) / tested + (z / (2 * tested)) ** 2) / (1 + z * z / tested)
        lines.append(
            f"{tested} test images: an accuracy is known to about {100 * half:.1f} points either way (95 %), and "
            "smaller differences say nothing."
        )
    lines += [
        f"{run.setting.name}: the loss is nan from step {run.diverged_at} on, where it was stopped: without float32 "
        "masters the optimizer's own arithmetic is 16-bit, and its eps of 1e-8 is 0 in float16."
        for run in runs
        if run.diverged_at is not None
    ]
    return lines


def speeds(width: int) -> list[str]:
    """How long this machine takes for the network's forward and backward pass in each type, and why."""
    took = {name: _milliseconds(width, dtype) for name, dtype in _TYPES.items()}
    slow = took["float16"] / took["float32"]
    lines = [
        "One forward and backward pass of the network, without mpinit: "
        + ", ".join(f"{name} {each:.1f} ms" for name, each in took.items())
        + f" ({_processor()})."
    ]
    if slow > 1.2:
        why = (
            ""
            if _has("avx512_fp16", "asimdhp", "fphp")
            else ": it has no arithmetic in float16, and converts every number"
        )
        lines.append(
            f"float16 takes {slow:.1f} times as long as float32 on this processor{why}. The time below is the "
            "processor's; look at the other columns. Accelerators with 16-bit units are what float16 is fast on."
        )
    return lines


_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _milliseconds(width: int, dtype: torch.dtype, passes: int = 5) -> float:
    """The shortest of some passes over 64 images."""
    model, images = digits_net(width).to(dtype), torch.rand(64, 1, 8, 8, dtype=dtype)
    took = []
    for _ in range(passes):
        begin = time.perf_counter()
        model(images).float().sum().backward()
        took.append(1000 * (time.perf_counter() - begin))
    return min(took)


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _has(*flags: str) -> bool:
    return bool(set(flags) & set(_cpuinfo().split()))


def _processor() -> str:
    named = [line.partition(":")[2].strip() for line in _cpuinfo().splitlines() if line.startswith("model name")]
    return f"{named[0] if named else platform.machine()}, {torch.get_num_threads()} thread"
