"""Run the suite: python -m examples.benchmarks.run [--quick] [--device cuda]; tables on stdout, JSON and PNG."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from . import goals, machine, plot, report, saving, traffic
from .roster import ROSTER
from .turns import Settings, play
from .workloads import WORKLOADS

SCHEMA = 1
REFERENCE = "fp32"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", choices=list(ROSTER), default=list(ROSTER))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, help="turns per contender (default 9 on CPU, 7 on CUDA; 2 with --quick)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no workload after this many seconds")
    saving.add_options(parser)
    return parser.parse_args(arguments)


def settings_for(options: argparse.Namespace) -> Settings:
    """What the command line means for each turn."""
    if options.quick:
        return Settings("quick", options.device, warmup=3, rounds=options.rounds or 2, round_ms=5.0, max_steps=3)
    rounds, round_ms = (9, 150.0) if options.device == "cpu" else (7, 100.0)
    return Settings(
        options.device, options.device, warmup=10, rounds=options.rounds or rounds, round_ms=round_ms, max_steps=100
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, workload by workload, printing each table as it is done; return the results."""
    settings = settings_for(options)
    results: dict[str, Any] = {"schema": SCHEMA, **machine.describe(options.device), "quick": options.quick}
    results["workloads"] = []
    begin = time.monotonic()
    for name in options.workloads:
        if time.monotonic() - begin > options.limit_s:
            print(f"{name}: left out, the {options.limit_s:.0f} s are over")
            continue
        size = dict(WORKLOADS[name].sizes[settings.size])
        rows = play(name, options.contenders, size, settings)
        parameters = next((row["parameters"] for row in rows if row["status"] == "ok"), 0)
        result = {"name": name, "size": size, "parameters": parameters, "reference": REFERENCE, "contenders": rows}
        results["workloads"].append(result)
        print(report.workload_table(result), flush=True)
        if name == "bandwidth":
            print(traffic.table(result), end="\n\n", flush=True)
    results["seconds"] = round(time.monotonic() - begin, 1)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, then write JSON and plot, then judge the goals."""
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: this torch sees no CUDA device; leave --device out to measure the CPU")
    results = run(options)
    path = saving.save(results, "bench", options)
    print(goals.table(results))
    print(f"\n{results['seconds']} s; figures in {path}")
    picture = plot.draw(results, path.with_suffix(".png"))
    print(f"plot in {picture}" if picture else "no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
