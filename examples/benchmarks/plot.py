"""A picture of the results: time against float32 per workload, and bytes per parameter by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import spread
from .footprint import KINDS
from .report import per_parameter
from .roster import ROSTER
from .workloads import WORKLOADS


def draw(results: dict[str, Any], path: Path) -> Path | None:
    """Write a PNG; None where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    shown = [result for result in results["workloads"] if _done(result)]
    columns = 2
    rows = (len(shown) + 2) // columns
    figure, panels = pyplot.subplots(rows, columns, figsize=(15, 4.6 * rows), layout="constrained", squeeze=False)
    cells = list(panels.flat)
    for result, panel in zip(shown, cells, strict=False):
        _times(panel, result)
    memory = next((result for result in shown if result["name"] == "bandwidth"), shown[-1] if shown else None)
    if memory is not None:
        _bytes(cells[len(shown)], memory)
    for panel in cells[len(shown) + 1 :]:
        panel.axis("off")
    figure.suptitle(f"{results['machine']}, torch {results['torch']}, mpinit {results['mpinit']}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _done(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["contenders"] if row["status"] == "ok"]


def _times(panel: Any, result: dict[str, Any]) -> None:
    rows = _done(result)
    base = next((row for row in rows if row["name"] == result["reference"]), rows[0])
    ratios = [spread.ratio(spread.phase(row, "total"), spread.phase(base, "total")) for row in rows]
    middles = [ratio.median for ratio in ratios]
    reach = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
    ours = ["tab:orange" if row["name"].startswith(("o0", "o1", "o2", "o3")) else "tab:blue" for row in rows]
    panel.barh([ROSTER[row["name"]].title for row in rows], middles, xerr=reach, color=ours, ecolor="black", capsize=2)
    panel.bar_label(panel.containers[-1], [f" {middle:.2f}" for middle in middles], fontsize=7, padding=6)
    panel.axvline(1.0, color="grey", linewidth=0.8)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.tick_params(axis="y", labelsize=8)
    panel.set_title(WORKLOADS[result["name"]].title, fontsize=10)
    panel.set_xlabel(f"time per step / {ROSTER[base['name']].title}  (median, interquartile range)", fontsize=8)


def _bytes(panel: Any, result: dict[str, Any]) -> None:
    rows = _done(result)
    names = [ROSTER[row["name"]].title for row in rows]
    held = [per_parameter(row["memory"]["after_backward"], result["parameters"]) for row in rows]
    left = [0.0] * len(rows)
    for kind in KINDS:
        lengths = [bytes_by_kind[kind] for bytes_by_kind in held]
        panel.barh(names, lengths, left=left, label=kind)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    panel.bar_label(panel.containers[-1], [f" {total:.1f}" for total in left], fontsize=7)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.tick_params(axis="y", labelsize=8)
    panel.legend(fontsize=8)
    panel.set_title(f"memory after backward, {result['name']} workload", fontsize=10)
    panel.set_xlabel("bytes per parameter", fontsize=8)
