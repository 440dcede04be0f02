"""initialize on a large model: peak, time, import: python -m examples.benchmarks.init_scale [--parameters 1e9]."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from . import machine, report, saving, spread
from .init_child import LEVELS, InitChild
from .saving import ROOT
from .workers import once

MIB = 2**20
# torch makes tensors of a few bytes out of the numbers that a kernel is given.
PAGE = 4096
IMPORT_LIMIT_S = 0.25
# Twice the time a parameter at four times the size would be growth that is not linear; less is the machine's noise.
LINEAR_LIMIT = 2.0
_IMPORT = "import time, torch\nbegin = time.perf_counter()\nimport mpinit\nprint(time.perf_counter() - begin)"


def import_seconds(repeats: int) -> list[float]:
    """What ``import mpinit`` adds to ``import torch``, each time in a fresh interpreter."""
    command = [sys.executable, "-c", _IMPORT]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT) for _ in range(repeats)]
    return [float(run.stdout) for run in runs]


def measure(parameters: int, side: int, device: str, repeats: int) -> dict[str, Any]:
    """Import time; bytes for each level and incoming type; time at a quarter, half and all of the parameters."""
    common: dict[str, Any] = {"side": side, "device": device}
    sizes = [parameters // 4, parameters // 2, parameters]
    return {
        "schema": 1,
        **machine.describe("cuda" if device == "cuda" else "cpu"),
        "largest_parameter": side * side,
        "import_seconds": import_seconds(repeats),
        "bytes": []
        if device == "meta"
        else [
            once(InitChild, "bytes_taken", parameters=parameters, level=level, weights=weights, **common)
            for weights in ("bfloat16", "float32")
            for level in LEVELS
        ],
        "seconds": [
            once(InitChild, "seconds", {"repeats": repeats}, parameters=size, level=level, **common)
            for level in LEVELS
            for size in sizes
        ],
    }


def bytes_table(results: dict[str, Any]) -> str:
    """Peak against the footprint, per level and incoming type, in bytes per parameter."""
    head = ("level", "weights given", "before", "after", "peak", "over allowed", "state_dict adds", "its peak")
    rows = []
    for row in results["bytes"]:
        each = [f"{row[name] / row['parameters']:.2f}" for name in ("before", "after", "peak")]
        added = [f"{row[name] / row['parameters']:.2f}" for name in ("state_dict", "state_dict_peak")]
        rows.append([row["level"], row["weights"], *each, f"{excess(row, results) / MIB:.1f} MiB", *added])
    return report.table(head, rows)


def excess(row: dict[str, Any], results: dict[str, Any]) -> int:
    """Bytes of the peak beyond the footprint and one largest parameter in float32; 0 where it stays within."""
    allowed = max(row["before"], row["after"]) + 4 * results["largest_parameter"]
    return max(0, int(row["peak"]) - int(allowed))


def seconds_table(results: dict[str, Any]) -> str:
    """Time of initialize per level and size."""
    rows = []
    for run in results["seconds"]:
        took = spread.of([seconds * 1e3 for seconds in run["seconds"]])
        per = took.median * 1e6 / run["parameters"]
        rows.append([run["level"], f"{run['parameters']:,}", str(took), f"{per:.2f}"])
    return report.table(("level", "parameters", "initialize, ms", "ns a parameter"), rows)


def growth(results: dict[str, Any]) -> dict[str, float]:
    """Per level, time a parameter at the full size over time a parameter at a quarter of it."""
    costs: dict[str, list[float]] = {}
    for run in results["seconds"]:
        costs.setdefault(run["level"], []).append(median(run["seconds"]) / run["parameters"])
    return {level: cost[-1] / cost[0] for level, cost in costs.items()}


def goals_table(results: dict[str, Any]) -> str:
    """Each goal, its figure, and whether it is met."""
    imports = spread.of(results["import_seconds"])
    worst = max(growth(results).values())
    quick, linear = imports.median <= IMPORT_LIMIT_S, worst <= LINEAR_LIMIT
    rows = [
        ["import mpinit over import torch, s", str(imports), f"<= {IMPORT_LIMIT_S}", _word(quick)],
        ["time a parameter, full size / quarter size", f"{worst:.2f}", f"<= {LINEAR_LIMIT}", _word(linear)],
    ]
    for weights in ("bfloat16", "float32") if results["bytes"] else ():
        over = max(excess(row, results) for row in results["bytes"] if row["weights"] == weights) / MIB
        title = f"peak over footprint + one largest parameter, {weights} given, MiB"
        rows.append([title, f"{over:.1f}", "0", _word(over < PAGE / MIB)])
    return "## Goals\n" + report.table(("goal", "measured", "limit", ""), rows)


def _word(met: bool) -> str:
    return "met" if met else "NOT met"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=64e6, help="of the largest model (default 64e6)")
    parser.add_argument("--side", type=int, default=1024, help="of its square layers (default 1024)")
    parser.add_argument("--device", choices=("cpu", "cuda", "meta"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    saving.add_options(parser)
    options = parser.parse_args(arguments)
    parameters, side, repeats = int(options.parameters), options.side, options.repeats
    if options.quick:
        parameters, side, repeats = 2**16, 64, 1
    results = measure(parameters, side, options.device, repeats)
    path = saving.save(results, "init", options)
    print(f"{results['machine']}, torch {results['torch']}, mpinit {results['mpinit']}\n")
    print("\n\n".join((bytes_table(results), seconds_table(results), goals_table(results), f"figures in {path}")))


if __name__ == "__main__":
    main()
