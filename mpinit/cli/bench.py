"""``mpinit bench``: a model trained at every level, each in a fresh process, compared."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from ..basics.tables import counted
from ..settings.opt_levels import OPT_LEVELS
from .contender import TORCH_AMP, measure
from .objects import describe_model
from .output import progress, show_json, show_table

_ALL: Final = (*OPT_LEVELS, *TORCH_AMP)


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.description = (
        "Train a model on one random batch at O0 to O5 and with torch.amp, each in a process of its own, and compare "
        "time a step, memory and the loss after the last step."
    )
    describe_model(parser)
    parser.add_argument(
        "--levels", default=",".join(_ALL), help=f"which ones, comma-separated. Default all: {', '.join(_ALL)}"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of training. Default 20")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="of torch.optim, or pkg.mod:Name")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate. Default 0.001")
    parser.add_argument("--plot", metavar="FILE", help="write a plot, such as bench.png (needs matplotlib)")
    parser.add_argument("--contender", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Train, compare, show."""
    if arguments.contender:
        print(json.dumps(measure(arguments.contender, arguments)))
        return 0
    levels = [level.strip() for level in arguments.levels.split(",") if level.strip()]
    unknown = [level for level in levels if level not in _ALL]
    if unknown or not levels or arguments.steps < 2:
        given = f"--levels {arguments.levels} --steps {arguments.steps}"
        raise ValueError(f"{given}: the levels are {', '.join(_ALL)}, and steps at least 2")
    with progress(len(levels), "training") as advance:
        found = []
        for level in levels:
            advance(level)
            found.append({"level": level, **_in_a_process(level, arguments)})
    if all("error" in result for result in found):
        raise ValueError(str(found[0]["error"]))
    if arguments.plot:
        _plot(found, arguments)
    if arguments.json:
        show_json(found)
        return 0
    _show(found, arguments)
    return 0


def _in_a_process(level: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "mpinit", "bench", arguments.factory, "--contender", level]
    for spec in arguments.input:
        command += ["--input", spec]
    for name in ("loss", "device", "batch", "steps", "optimizer", "lr"):
        value = getattr(arguments, name)
        if value is not None:
            command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": lines[-1].removeprefix("mpinit bench: ")}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _show(found: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    first = next(result for result in found if "error" not in result)
    rows = []
    for result in found:
        if "error" in result:
            rows.append([result["level"], "", "", "", "", "", "", result["error"]])
            continue
        rows.append(
            [
                result["level"],
                f"{result['ms']:.3g}",
                f"{first['ms'] / result['ms']:.2f}x",
                f"{result['memory'] / 2**20:.1f}",
                f"{result['first_loss']:.5g}",
                f"{result['loss']:.5g}",
                str(result["skipped"]),
                "",
            ]
        )
    head = [
        "level",
        "ms a step",
        f"to {first['level']}",
        "MiB",
        "first loss",
        "last loss",
        "skipped",
        "refused",
    ]
    if not any("error" in result for result in found):
        head, rows = head[:-1], [row[:-1] for row in rows]
    title = f"{arguments.factory}, {counted(arguments.steps, 'step')} on {arguments.device}"
    show_table(title, head, rows, numbers=range(1, 7))
    what = "at its peak on the device" if first["on_device"] else "more resident at the peak than before the model"
    print(f"ms: the median of the second half. MiB: {what}. Times on a busy machine differ from run to run.")
    if arguments.plot:
        print(f"written: {arguments.plot}")


def _plot(found: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise RuntimeError("plots need matplotlib: pip install matplotlib, or mpinit[plot]") from error
    done = [result for result in found if "error" not in result]
    names = [result["level"] for result in done]
    figure = figures.Figure(figsize=(12, 3.8), layout="constrained")
    time, memory, loss = figure.subplots(1, 3)
    time.barh(names, [result["ms"] for result in done], color="#3567b0")
    time.set_xlabel("ms a step")
    memory.barh(names, [result["memory"] / 2**20 for result in done], color="#d9a441")
    memory.set_xlabel("MiB")
    for axes in (time, memory):
        axes.invert_yaxis()
    for result in done:
        loss.plot(range(1, len(result["losses"]) + 1), result["losses"], label=result["level"], linewidth=1.2)
    loss.set_xlabel("step")
    loss.set_ylabel("loss")
    loss.legend(fontsize=7, frameon=False)
    for axes in (time, memory, loss):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{arguments.factory} on {arguments.device}", fontsize=11)
    target = Path(arguments.plot)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
