"""Bytes per parameter that training with Adam holds after backward: python -m examples.benchmarks.memory [--quick]."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from . import machine, report, saving
from .footprint import KINDS
from .roster import ROSTER
from .turns import Settings, play

# What arithmetic says each way must hold: weights, masters, gradients, states. O1 holds what torch.amp holds.
PREDICTED = {
    "fp32": (4, 0, 4, 8),
    "amp_fp16": (4, 0, 4, 8),
    "hand_fp16": (2, 4, 6, 8),
    "o2_fp16": (2, 4, 4, 8),
    "o2_bf16": (2, 4, 4, 8),
    "o2_split": (2, 2.1, 2, 8),
    "o3_bf16": (2, 0, 2, 4),
}
# Others' ways, from what they keep; they are not run here.
ELSEWHERE = {
    "apex O2 (16-bit and float32 gradients)": (2, 4, 6, 8),
    "Megatron bf16 (float32 gradients)": (2, 4, 4, 8),
}
MIB = 2**20


def measure(size: dict[str, int], device: str) -> dict[str, Any]:
    """Measure each way in a process of its own, one process at a time."""
    settings = Settings("quick", device, warmup=3, rounds=0, round_ms=1.0, max_steps=1)
    rows = [row for name in PREDICTED for row in play("bandwidth", [name], size, settings)]
    parameters = size["tensors"] * size["side"] ** 2
    return {"schema": 1, **machine.describe(device), "parameters": parameters, "contenders": rows}


def table(results: dict[str, Any]) -> str:
    """Bytes per parameter by kind, predicted and measured, and what the step takes on top."""
    parameters = results["parameters"]
    rows = [_cells(row, parameters) for row in results["contenders"]]
    for title, kinds in ELSEWHERE.items():
        rows.append([title, *(f"({count})" for count in kinds), f"{sum(kinds)}", "not run", "-"])
    head = ("Adam, after backward", *KINDS, "predicted", "measured", "step's peak on top, MiB")
    return report.table(head, rows)


def _cells(row: dict[str, Any], parameters: int) -> list[str]:
    title, predicted = ROSTER[row["name"]].title, f"{sum(PREDICTED[row['name']])}"
    if row["status"] != "ok":
        return [title, *("-" for _ in KINDS), predicted, row["status"], "-"]
    held = row["memory"]["after_backward"]
    each = report.per_parameter(held, parameters)
    above = (row["memory"]["peak_step"] - sum(held.values())) / MIB
    return [title, *(f"{each[kind]:.2f}" for kind in KINDS), predicted, f"{each['total']:.2f}", f"{above:.0f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=40e6, help="about how many (default 40e6)")
    saving.add_options(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    side = 400 if options.quick else round((options.parameters / 40) ** 0.5)
    results = measure({"tensors": 4 if options.quick else 40, "side": side}, options.device)
    path = saving.save(results, "memory", options)
    print(f"{results['machine']}, {results['parameters']:,} parameters\n\n{table(results)}\n\nfigures in {path}")


if __name__ == "__main__":
    main()
