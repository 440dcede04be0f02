"""Pictures of committed results: time and memory, one for each 16-bit dtype, and the growth of mpinit's cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import growth_figures, stamps
from .estimate import Estimate
from .footprint import KINDS
from .growth import AXES
from .results import Results, measurable
from .roster import BY_TYPE
from .suite import title_of

COLUMNS = 2
KIND_COLORS = dict(zip(KINDS, ("#0072b2", "#56b4e9", "#e69f00", "#009e73"), strict=True))
OURS, THEIRS = "#d55e00", "#555555"


def training_path(folder: Path, dtype: str) -> Path:
    """Return the path of the picture of a 16-bit dtype."""
    return folder / f"training-{dtype}.png"


def growth_path(folder: Path) -> Path:
    """Return the path of the picture of growth."""
    return folder / "growth.png"


def draw(found: Mapping[str, Results], folder: Path) -> list[Path]:
    """Write every picture there are results for."""
    made = drawn_from(found, folder)
    for dtype in BY_TYPE:
        path = training_path(folder, dtype)
        if path in made:
            _training(_training_rows(found, dtype), found.get("memory"), dtype, path, stamps.of_results(made[path]))
    path = growth_path(folder)
    if path in made:
        _growth(_growth_rows(found), path, stamps.of_results(made[path]))
    return list(made)


def drawn_from(found: Mapping[str, Results], folder: Path) -> dict[Path, list[Results]]:
    """Return the results that each picture shows."""
    made: dict[Path, list[Results]] = {}
    for dtype in BY_TYPE:
        rows = list(_training_rows(found, dtype).values())
        if rows:
            made[training_path(folder, dtype)] = [*rows, *([found["memory"]] if "memory" in found else [])]
    rows = list(_growth_rows(found).values())
    if rows:
        made[growth_path(folder)] = rows
    return made


def _training_rows(found: Mapping[str, Results], dtype: str) -> dict[str, Results]:
    kind = {name: results for name, results in found.items() if results.workload.kind == "training"}
    return measurable({name: r for name, r in kind.items() if any(map(r.rounds, BY_TYPE[dtype]))})


def _growth_rows(found: Mapping[str, Results]) -> dict[str, Results]:
    return measurable({name: results for name, results in found.items() if results.workload.kind == "growth"})


def _panels(count: int, height: float) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = -(-count // COLUMNS)
    figure, grid = pyplot.subplots(lines, COLUMNS, figsize=(11, height * lines), layout="constrained", squeeze=False)
    panels = list(grid.flat)
    for panel in panels[count:]:
        panel.axis("off")
    for panel in panels[:count]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#e4e4e4", linewidth=0.6)
        panel.set_axisbelow(True)
    return figure, panels


def _save(figure: Any, path: Path, stamp: str) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, metadata={stamps.KEY: stamp})
    pyplot.close(figure)


def _training(rows: Mapping[str, Results], memory: Results | None, dtype: str, path: Path, stamp: str) -> None:
    figure, panels = _panels(len(rows) + (memory is not None), 4.0)
    for (name, results), panel in zip(rows.items(), panels, strict=False):
        panel.set_title(name, fontsize=12, loc="left")
        names = [contender for contender in ("fp32", *BY_TYPE[dtype]) if results.rounds(contender)]
        _times(panel, results, names)
    if memory is not None:
        _bytes(panels[len(rows)], memory, dtype)
    figure.suptitle(f"Time of a step over float32's, {dtype}: median and 95 % interval over processes", fontsize=13)
    _save(figure, path, stamp)


def _times(panel: Any, results: Results, names: Sequence[str]) -> None:
    estimates: list[Estimate] = []
    for name in names:
        estimate = results.ratio(name, "fp32")
        assert estimate is not None, "it has rounds, and so has float32"
        estimates.append(estimate)
    for place, (name, estimate) in enumerate(zip(names, estimates, strict=True)):
        color = OURS if title_of(name).startswith("mpinit") else THEIRS
        panel.barh(place, estimate.median, height=0.62, color=color, alpha=0.85)
        panel.plot([estimate.low, estimate.high], [place, place], color="black", linewidth=1.4)
        # On white, in front of the line at 1.
        panel.annotate(
            f"{estimate.median:.2f}", (estimate.high, place), (8, 0), textcoords="offset points", va="center",
            fontsize=10, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
    panel.set_yticks(range(len(names)), [title_of(name) for name in names], fontsize=10)
    panel.set_xlim(0, 1.2 * max(estimate.high for estimate in estimates))
    panel.axvline(1.0, color="grey", linewidth=0.8, zorder=2)
    panel.invert_yaxis()


def _bytes(panel: Any, results: Results, dtype: str) -> None:
    names = [name for name in ("fp32", *BY_TYPE[dtype]) if results.facts(name)]
    facts = [results.facts(name) for name in names]
    totals = [0.0] * len(names)
    for kind in KINDS:
        lengths = [each[f"bytes_{kind}"] / each["parameters"] for each in facts]
        panel.barh(range(len(names)), lengths, left=totals, height=0.62, label=kind, color=KIND_COLORS[kind])
        totals = [start + length for start, length in zip(totals, lengths, strict=True)]
    for place, total in enumerate(totals):
        panel.text(total, place, f"  {total:.1f}", va="center", fontsize=10)
    panel.set_yticks(range(len(names)), [title_of(name) for name in names], fontsize=10)
    panel.set_xlim(0, 1.15 * max(totals))
    panel.invert_yaxis()
    panel.set_title("bytes per parameter, Adam", fontsize=12, loc="left")
    # Below the bars: a legend among them would hide some.
    panel.legend(fontsize=10, frameon=False, ncols=4, loc="upper right", bbox_to_anchor=(1.0, -0.08))


def _growth(found: Mapping[str, Results], path: Path, stamp: str) -> None:
    rows = list(found.values())
    figure, panels = _panels(len(rows), 4.0)
    for results, panel in zip(rows, panels, strict=False):
        axis = AXES[results.name.removeprefix("grow_")]
        panel.set_xlabel(axis.title, fontsize=10)
        at = growth_figures.points(results)
        step = growth_figures.step_slope(results).median
        _curve(panel, at, growth_figures.step_seconds(results), f"scale_loss + step, slope {step:.2f}", OURS)
        if results.name != "grow_steps":
            set_up = growth_figures.initialize_slope(results).median
            _curve(panel, at, growth_figures.initialize_seconds(results), f"initialize, slope {set_up:.2f}", "#0072b2")
        panel.set_xscale("log")
        panel.set_yscale("log")
        # Above the axes, where no curve is.
        panel.legend(fontsize=10, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0))
    panels[0].set_ylabel("ms", fontsize=10)
    figure.suptitle("What mpinit costs at O2 with Adam as something grows; slope: exponent over the last three points")
    _save(figure, path, stamp)


def _curve(panel: Any, at: Sequence[int], times: Sequence[Estimate], label: str, color: str) -> None:
    ms = [estimate.times(1e3) for estimate in times]
    reach = [[e.median - e.low for e in ms], [e.high - e.median for e in ms]]
    panel.errorbar(
        at, [e.median for e in ms], yerr=reach, label=label, color=color, marker="o", markersize=4, capsize=3
    )
