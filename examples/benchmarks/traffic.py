"""The Adam step of the bandwidth-bound workload: passes over memory predicted beside what was measured."""

from __future__ import annotations

from statistics import median
from typing import Any

from . import report, spread
from .roster import ROSTER

# Bytes read and written per parameter between the arrival of gradients in the weights' dtype and the next forward.
ADAM = 28  # reads gradient, weight, two states; writes weight, two states; all float32
CHECK = 8  # reads and writes a float32 gradient
WIDEN = 6  # reads a 16-bit gradient, writes a float32 one
ROUND = 6  # reads a float32 master, writes a 16-bit weight
SPLIT = 16  # reads weight and remainder, writes a float32 master, and back

PASSES: dict[str, tuple[tuple[str, int], ...]] = {
    "fp32": (("Adam", ADAM),),
    "fp32_checked": (("check", CHECK), ("Adam", ADAM)),
    "amp_fp16": (("check", CHECK), ("Adam, which writes the unscaled gradient too", ADAM + 4)),
    "hand_fp16": (("widen", WIDEN), ("check", CHECK), ("Adam", ADAM), ("round", ROUND)),
    "hand_bf16": (("widen", WIDEN), ("check", CHECK), ("Adam", ADAM), ("round", ROUND)),
    "hand_bf16_unchecked": (("widen", WIDEN), ("Adam", ADAM), ("round", ROUND)),
    "o2_fp16": (("widen", WIDEN), ("check", CHECK), ("Adam", ADAM), ("round", ROUND)),
    "o2_bf16": (("widen", WIDEN), ("Adam", ADAM), ("round", ROUND)),
    "o2_compiled": (("widen", WIDEN), ("check", CHECK), ("Adam that rounds", ADAM + 2)),
    "o2_split": (("widen", WIDEN), ("split", SPLIT), ("Adam", ADAM)),
}
# Whose forward and backward are nothing but the arrival of gradients in the weights' dtype.
_PLAIN = {"fp32": "fp32", "amp": "fp32", "hand": "hand_fp16", "o2": "hand_fp16"}


def update_ms(row: dict[str, Any], plain: dict[str, Any]) -> list[float]:
    """The optimizer's part of each round, with whatever was moved out of it: what exceeds ``plain``'s arrival."""
    arrival = [turn["forward"] + turn["backward"] for turn in plain["turns_ms"]]
    return [total - spent for total, spent in zip(spread.phase(row, "total"), arrival, strict=True)]


def table(result: dict[str, Any]) -> str:
    """Predicted bytes per parameter, measured time, and the bandwidth that the two imply."""
    rows = {row["name"]: row for row in result["contenders"] if row["status"] == "ok"}
    cells = []
    for name, passes in PASSES.items():
        plain = rows.get(_PLAIN[name.split("_")[0]])
        if name in rows and plain is not None:
            cells.append(_cells(name, passes, median(update_ms(rows[name], plain)), result["parameters"]))
    head = ("the step alone", "passes", "bytes/param", "ms", "GB/s")
    return "### Passes over memory, predicted and measured\n\n" + report.table(head, cells)


def _cells(name: str, passes: tuple[tuple[str, int], ...], milliseconds: float, parameters: int) -> list[str]:
    total = sum(count for _, count in passes)
    steps = " + ".join(f"{what} {count}" for what, count in passes)
    rate = total * parameters / milliseconds / 1e6
    return [ROSTER[name].title, steps, str(total), f"{milliseconds:.2f}", f"{rate:.1f}"]
