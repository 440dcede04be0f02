"""Launches, reads and copies of an iteration, counted on the simulated device: ``python -m benchmarks.launches``.

It writes two tables of the page about limits: of iterations, and of loops with extras beside the same loops by hand. A
launch is one operation on the device, also if it works on many tensors. The batch is on the device beforehand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from .case import Unavailable
from .loops import EXTRAS, LEVELS, LoopTraining
from .results import ROOT
from .roster import ROSTER, Row
from .tasks import TASKS, Task
from .with_mpinit import Mpinit

PAGE: Final = ROOT / "docs" / "reference" / "limits.md"
SIZE: Final[Mapping[str, int]] = {"blocks": 20, "width": 64, "batch": 8}
FORMS: Final = ("fused", "foreach")
NAMES: Final = (
    *("fp32", "amp_fp16", "amp_bf16", "hand_fp16", "hand_bf16", "o1_fp16", "o1_bf16", "o2_fp16", "o2_bf16"),
    *("o2_split", "o2_int8"),
)
IN_MODEL: Final = Row('mpinit O2, "model"', partial(Mpinit, opt_level="O2", master_weights="model"))
ROWS: Final[Mapping[str, Row]] = {name: ROSTER[name] for name in NAMES} | {"in_model": IN_MODEL}
# The loops of these levels, and the extras, whose checkpoint is counted alone.
LOOP_LEVELS: Final = ("o2", "o5")
LOOP_EXTRAS: Final = tuple(name for name in EXTRAS if name != "checkpoint_10")
Counts = tuple[int, int, int]


def counted(row: Row, form: str) -> Counts | None:
    """Count launches, host reads and copies between devices of an iteration; None where the form is unavailable."""
    import simulated_device

    torch.manual_seed(0)
    task: Task = TASKS["launch"].build(SIZE, torch.device("sim"))
    try:
        contender = row.build(replace(task, rule=replace(task.rule, form=form)))
    except Unavailable:
        return None
    for index in range(4):
        with simulated_device.counted() as found:
            loss = contender.forward(*task.batches[index])
            contender.backward(loss)
            contender.finish_gradients()
            contender.update()
    if isinstance(contender, Mpinit):
        contender.mpinit.undo(contender.model)
    return found.launches, found.reads, found.copies


def table() -> str:
    """Return the table in Markdown."""
    import simulated_device

    simulated_device.start()
    head = ["", *(f"{what}, {form}" for form in FORMS for what in ("launches", "reads", "copies")), "what is read"]
    lines = [head, ["---"] * len(head)]
    with simulated_device.autocast_list():
        for name, row in ROWS.items():
            found = [counted(row, form) for form in FORMS]
            scales = name.endswith("fp16") or name == "in_model"
            title = f"{row.title}, {'fp16' if scales else 'bf16'}" if name != "fp32" else row.title
            cells = [str(number) for counts in found for number in counts or ("-",) * 3]
            lines.append([title, *cells, _what_is_read(scales, [counts[1] for counts in found if counts is not None])])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _what_is_read(scales: bool, reads: list[int]) -> str:
    if any(reads):
        return "the verdict on an overflow: without it a step that is not fused cannot be skipped"
    return "nothing: the step skips by itself" if scales else "nothing: no scale moves"


def counted_loop(name: str) -> Counts:
    """Count an iteration of a loop with an extra, such as ``o2_bf16+ema``; of a checkpoint the checkpoint alone."""
    import simulated_device

    torch.manual_seed(0)
    case = LoopTraining("launch_adamw", name, SIZE, "sim")
    case.build()
    for _ in range(3):
        case.iteration()
    with simulated_device.counted() as found:
        case.work.at_end() if case.work.iterations > 1 else case.iteration()
    if isinstance(case.contender, Mpinit):
        case.contender.mpinit.undo(case.contender.model)
    return found.launches, found.reads, found.copies


def loops() -> dict[tuple[str, str], list[Counts]]:
    """Count every loop: (extra, level) -> by hand, mpinit, and at O5 mpinit with split masters."""
    found = {}
    for extra in LOOP_EXTRAS:
        for key in LOOP_LEVELS:
            level = LEVELS[key]
            by_hand = f"{level.by_hand}+{EXTRAS[extra].counterpart or extra}"
            ours = [f"{way}+{extra}" for way in level.ours if level.measures(way, extra)]
            found[extra, key] = [counted_loop(name) for name in (by_hand, *ours)]
    return found


def loops_table() -> str:
    """Return the table of loops in Markdown: launches, reads and copies, with commas between."""
    import simulated_device

    simulated_device.start()
    lines = [["an iteration with", "level", "by hand", "mpinit", "mpinit split"], ["---"] * 5]
    for (extra, level), counts in loops().items():
        title = EXTRAS[extra].title if extra != "checkpoint" else "the checkpoint alone"
        cells = [", ".join(map(str, each)) for each in counts]
        lines.append([title, LEVELS[level].title, *cells, *["-"] * (3 - len(cells))])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def replaced(text: str) -> str:
    """Return ``text`` with the tables made anew."""
    for name, made in (("launches", table), ("launches of loops", loops_table)):
        marked = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.S)
        assert marked.search(text), f"the page has no place for {name}"
        text = marked.sub(lambda mark, made=made: f"{mark[1]}\n{made()}\n{mark[2]}", text)  # type: ignore[misc]
    return text


def main() -> int:
    """Write the tables into the page."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
