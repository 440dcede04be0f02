"""Measure workloads, and make tables of results: python -m benchmarks run [--quick], python -m benchmarks tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import results, tables
from .protocol import FULL, QUICK, run
from .suite import TARGETS, workloads


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run", help="measure the workloads that have no results yet")
    measure.add_argument("--quick", action="store_true", help="tiny sizes, to test that everything runs")
    measure.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    measure.add_argument("--workloads", nargs="+", choices=list(workloads("full")), help="only these workloads")
    measure.add_argument(
        "--targets", nargs="+", choices=TARGETS, default=TARGETS[:1], help="all workloads of these targets of make"
    )
    measure.add_argument("--contenders", nargs="+", help="only these contenders, and the controls")
    measure.add_argument("--rounds", type=int, help="processes of each contender; figures are shown from 5 on")
    measure.add_argument("--fresh", action="store_true", help="measure again, also if there are results")
    measure.add_argument("--out", type=Path, help="folder for the results")
    show = commands.add_parser("tables", help="write README's and the documentation's tables and plots from results")
    show.add_argument("--print", action="store_true", help="print them instead")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command."""
    options = parse(arguments)
    if options.command == "tables":
        if options.print:
            print(tables.summary(tables.machines()[0], "full"))
        else:
            tables.write()
        return
    effort = QUICK if options.quick else FULL
    if options.rounds is not None:
        effort = replace(effort, rounds=options.rounds, most_rounds=options.rounds)
    out = options.out or results.folder(options.device, effort.size)
    chosen = [name for name, row in workloads(effort.size).items() if row.target in options.targets]
    run(effort, options.device, out, options.workloads or chosen, options.contenders, options.fresh)
    print(tables.summary(out, effort.size))


if __name__ == "__main__":
    main()
