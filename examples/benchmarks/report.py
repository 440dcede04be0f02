"""Results as tables for people; every ratio is taken inside one run and carries its spread."""

from __future__ import annotations

from typing import Any

from . import spread
from .footprint import KINDS
from .roster import ROSTER
from .workloads import WORKLOADS

_HEAD = (
    "contender", "ms a step", "ratio", "forward", "backward", "step",
    "bytes/param", "peak step", "peak", "ops", "kernels", "syncs", "loss",
)  # fmt: skip


def table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    """Columns padded to line up: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: tuple[str, ...] | list[str]) -> str:
        first, *rest = (f"{cell:{'<' if not i else '>'}{widths[i]}}" for i, cell in enumerate(cells))
        return "  ".join((first, *rest)).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, rows)])


def workload_table(result: dict[str, Any]) -> str:
    """One workload: a row per contender, those that took no part below with their reason."""
    done = [row for row in result["contenders"] if row["status"] == "ok"]
    base = next((row for row in done if row["name"] == result["reference"]), None)
    lines = [f"## {WORKLOADS[result['name']].title}", f"{result['parameters']:,} parameters, {result['size']}"]
    if done:
        lines += ["", table(_HEAD, [_cells(row, base, result["parameters"]) for row in done])]
    for row in result["contenders"]:
        if row["status"] != "ok":
            lines.append(f"{ROSTER[row['name']].title}: {row['status']}: {row['reason']}")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any], base: dict[str, Any] | None, parameters: int) -> list[str]:
    total = spread.phase(row, "total")
    against = str(spread.ratio(total, spread.phase(base, "total"))) if base else "-"
    split = [f"{spread.of(spread.phase(row, name)).median:.2f}" for name in ("forward", "backward", "step")]
    memory = row["memory"]
    held = per_parameter(memory["after_backward"], parameters)["total"]
    counts = ["-" if row[name] is None else str(row[name]) for name in ("ops", "kernels", "host_syncs")]
    loss = row["loss"] if isinstance(row["loss"], str) else f"{row['loss']:.4g}"
    peaks = [f"{memory[name] / parameters:.1f}" for name in ("peak_step", "peak")]
    milliseconds = f"{spread.of(total).median:.2f}"
    return [ROSTER[row["name"]].title, milliseconds, against, *split, f"{held:.1f}", *peaks, *counts, loss]


def per_parameter(held: dict[str, int], parameters: int) -> dict[str, float]:
    """Bytes per parameter by kind, and their total."""
    return {kind: held[kind] / parameters for kind in KINDS} | {"total": sum(held.values()) / parameters}
