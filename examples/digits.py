"""Train a CNN with BatchNorm on scikit-learn's handwritten digits at O0, O1, O2 and O3, in float16 and bfloat16.

``make demo`` runs this. It prints a table and writes a plot of loss and loss scale to runs/demo/.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from demo.charts import draw
from demo.digits_data import load_digits
from demo.table import remarks, table
from demo.training import SETTINGS, Schedule, train


def arguments() -> argparse.Namespace:
    """Read the command line."""
    default = Schedule()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=default.epochs)
    parser.add_argument("--width", type=int, default=default.width, help="channels of the first convolution")
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="settings to run")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the plot and the table")
    return parser.parse_args()


def main() -> None:
    torch.set_num_threads(1)  # a network this small gains nothing from more, and its timing is steadier
    # A skipped step is part of dynamic loss scaling: here the table and the plot tell of it, not the log.
    logging.getLogger("mpinit").setLevel(logging.ERROR)
    options = arguments()
    schedule = Schedule(epochs=options.epochs, width=options.width)
    digits = load_digits()
    runs = [train(setting, digits, schedule) for setting in SETTINGS if setting.name in options.only]
    text = "\n".join([table(runs), "", *remarks(runs)])
    print(f"\n{text}\n")
    draw(runs, options.out / "loss_and_scale.png")
    (options.out / "table.txt").write_text(text + "\n", encoding="utf-8")
    print(f"Plot: {options.out / 'loss_and_scale.png'}")


if __name__ == "__main__":
    main()
