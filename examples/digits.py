"""Train a CNN with BatchNorm on scikit-learn's handwritten digits at O0, O1, O2 and O3, in float16 and bfloat16.

``make demo`` runs this. It says how fast this processor is in each type, prints a table of the levels and one of what
float32 masters give back to a fine-tuning in bfloat16, and writes a plot of loss and loss scale to runs/demo/. Ctrl-C
ends it early, with the rows and the plot of what is done. ``--publish`` writes what it found, tables and plot, into the
documentation as well.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
import sys
import textwrap
from pathlib import Path

import torch
from demo.charts import draw
from demo.digits_data import load_digits
from demo.fine_tuning import WAYS, Tuned, in_bfloat16, lowered, tune, tuned_table
from demo.table import aligned, remarks, speeds, table
from demo.training import SETTINGS, Run, Schedule, train

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs/tutorial/first-run.md", ROOT / "examples/results/digits.png"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    default = Schedule()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=default.epochs)
    parser.add_argument("--width", type=int, default=default.width, help="channels of the first convolution")
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="settings to run")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the plot and the table")
    parser.add_argument("--publish", action="store_true", help="put tables and plot into the documentation")
    return parser.parse_args()


def run_all(options: argparse.Namespace, runs: list[Run], tuned: list[Tuned]) -> None:
    """Train at every level, and tune what O0 came to in every way; what is done is added to the lists."""
    schedule = Schedule(epochs=options.epochs, width=options.width)
    digits = load_digits()
    saved = None
    for setting in SETTINGS:
        if setting.name in options.only:
            run, model = train(setting, digits, schedule)
            runs.append(run)
            saved = in_bfloat16(model) if setting.level == "O0" else saved
    for way in WAYS if saved is not None else ():
        tuned.append(tune(way, saved, lowered(digits), schedule))


def report(runs: list[Run], tuned: list[Tuned]) -> str:
    """The tables of what is done."""
    parts = []
    if runs:
        parts += [table(runs), filled(remarks(runs, len(load_digits().test_labels)))]
    if tuned:
        parts += [
            "Tuned for digits that lie one pixel lower, from the weights of O0 in bfloat16:",
            aligned(tuned_table(tuned)),
        ]
    return "\n\n".join(parts)


def filled(lines: list[str]) -> str:
    """Sentences in lines of at most 100 characters."""
    return "\n".join(textwrap.fill(line, 100) for line in lines)


def publish(text: str, plot: Path) -> None:
    """Put what was found in the place of what the documentation shows."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        re.sub(r"```none\n.*?```", lambda _: f"```none\n{text}\n```", page, flags=re.DOTALL), encoding="utf-8"
    )
    shutil.copy(plot, PICTURE)


def main() -> int:
    torch.set_num_threads(1)  # a network this small gains nothing from more, and its timing is steadier
    # A skipped step is part of dynamic loss scaling: here the table and the plot tell of it, not the log.
    logging.getLogger("mpinit").setLevel(logging.ERROR)
    options = arguments()
    fast = speeds(options.width)
    print(filled(fast), flush=True)
    runs: list[Run] = []
    tuned: list[Tuned] = []
    status = 0
    try:
        run_all(options, runs, tuned)
    except KeyboardInterrupt:
        print("\nInterrupted: this is what was done by then.", file=sys.stderr)
        status = 130
    tables = report(runs, tuned)
    print(f"\n{tables}\n")
    text = f"{filled(fast)}\n\n{tables}"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.txt").write_text(text + "\n", encoding="utf-8")
    if runs:
        plot = options.out / "loss_and_scale.png"
        draw(runs, plot)
        print(f"Plot: {plot}")
        if options.publish and not status:
            publish(text, plot)
    return status


if __name__ == "__main__":
    status = main()
    if status:
        sys.exit(status)
