"""``python -m benchmarks run`` measures, ``python -m benchmarks tables`` writes the tables of the pages."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import measure, tables


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and write benchmarks/results/DEVICE/*.json")
    run.add_argument("workloads", nargs="*", help="names of workloads; all without one")
    run.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    run.add_argument("--rounds", type=int, default=measure.ROUNDS, help="processes of each way")
    run.add_argument("--quick", action="store_true", help="tiny sizes, to try that everything runs")
    run.add_argument("--out", type=Path, help="another folder for the files")
    commands.add_parser("tables", help="write the tables of README and of the pages from the committed files")
    return parser.parse_args(words)


def main() -> None:
    """Run a command."""
    asked = parse()
    if asked.command == "tables":
        tables.write()
    else:
        measure.run(asked.workloads, asked.device, asked.rounds, asked.quick, asked.out)


if __name__ == "__main__":
    main()
