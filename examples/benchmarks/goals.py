"""The goals, measured figure beside limit: python -m examples.benchmarks.goals results/<machine>.json [--strict]."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import report, spread
from .spread import Spread
from .traffic import update_ms

Rows = dict[str, dict[str, Any]]
Figure = Callable[[Rows, int], Spread]
ANYWHERE = ("cpu", "cuda")


@dataclass(frozen=True)
class Goal:
    """One goal.

    Attributes:
        title: what is compared.
        workload: where.
        needs: the contenders that the figure reads.
        figure: (contenders' rows, parameters) -> the measured figure.
        limit: it may not exceed this.
        devices: where the goal holds.
    """

    title: str
    workload: str
    needs: tuple[str, ...]
    figure: Figure
    limit: float
    devices: tuple[str, ...] = ANYWHERE


def _whole(above: str, below: str) -> Figure:
    """Ratio of whole steps."""
    return lambda rows, _: spread.ratio(spread.phase(rows[above], "total"), spread.phase(rows[below], "total"))


def _update(above: str, plain: str, below: str) -> Figure:
    """Ratio of the optimizer's parts: ``above`` beyond ``plain``'s forward and backward, to ``below``'s step."""
    return lambda rows, _: spread.ratio(update_ms(rows[above], rows[plain]), spread.phase(rows[below], "step"))


def _bytes(name: str) -> Figure:
    """Bytes per parameter held after backward."""

    def figure(rows: Rows, parameters: int) -> Spread:
        held = report.per_parameter(rows[name]["memory"]["after_backward"], parameters)["total"]
        return Spread(held, held, held)

    return figure


def _ratio_goal(title: str, workload: str, above: str, below: str, limit: float, *devices: str) -> Goal:
    return Goal(title, workload, (above, below), _whole(above, below), limit, devices or ANYWHERE)


def _update_goal(title: str, above: str, plain: str, below: str, limit: float, *devices: str) -> Goal:
    figure = _update(above, plain, below)
    return Goal(title, "bandwidth", (above, plain, below), figure, limit, devices or ANYWHERE)


GOALS = (
    _ratio_goal("O2 / hand-written O2, fp16", "launch", "o2_fp16", "hand_fp16", 1.00),
    # At a loss scale of 1 O2 checks nothing, and neither does the loop that it is compared with.
    _ratio_goal("O2 / hand-written O2, bf16", "launch", "o2_bf16", "hand_bf16_unchecked", 1.00),
    _update_goal("O2 step / hand-written O2 step, fp16", "o2_fp16", "hand_fp16", "hand_fp16", 0.90),
    _update_goal("O2 step / hand-written O2 step, bf16", "o2_bf16", "hand_bf16_unchecked", "hand_bf16_unchecked", 0.90),
    _update_goal("O2 step / (float32 step + check), fp16", "o2_fp16", "hand_fp16", "fp32_checked", 1.25, "cpu"),
    _update_goal("O2 step / (float32 step + check), fp16", "o2_fp16", "hand_fp16", "fp32_checked", 1.00, "cuda"),
    _ratio_goal("O1 / torch.amp, fp16", "classic", "o1_fp16", "amp_fp16", 1.00, "cuda"),
    _ratio_goal("O1 / torch.amp, bf16", "classic", "o1_bf16", "amp_bf16", 1.00, "cuda"),
    _ratio_goal("O2 / torch.amp, fp16", "classic", "o2_fp16", "amp_fp16", 0.90, "cuda"),
    _ratio_goal("O2 / torch.amp, bf16", "classic", "o2_bf16", "amp_bf16", 0.90, "cuda"),
    _ratio_goal("O1 / torch.amp, fp16", "bert", "o1_fp16", "amp_fp16", 1.00, "cuda"),
    _ratio_goal("O1 / torch.amp, bf16", "bert", "o1_bf16", "amp_bf16", 1.00, "cuda"),
    _ratio_goal("O2 / torch.amp, fp16", "bert", "o2_fp16", "amp_fp16", 0.90, "cuda"),
    _ratio_goal("O2 / torch.amp, bf16", "bert", "o2_bf16", "amp_bf16", 0.90, "cuda"),
    Goal("bytes/param after backward, float32 masters", "bandwidth", ("o2_fp16",), _bytes("o2_fp16"), 18.0),
    Goal("bytes/param after backward, split masters", "bandwidth", ("o2_split",), _bytes("o2_split"), 14.1),
)


@dataclass(frozen=True)
class Verdict:
    """A goal with what was measured; no figure where a contender or the workload is missing."""

    goal: Goal
    figure: Spread | None

    @property
    def met(self) -> bool | None:
        """Whether the figure, rounded to two places as it is printed, is within the limit."""
        return None if self.figure is None else round(self.figure.median, 2) <= self.goal.limit


def judge(results: dict[str, Any]) -> list[Verdict]:
    """Every goal that holds on the results' device."""
    workloads = {result["name"]: result for result in results["workloads"]}
    return [_verdict(goal, workloads.get(goal.workload)) for goal in GOALS if results["device"] in goal.devices]


def _verdict(goal: Goal, result: dict[str, Any] | None) -> Verdict:
    rows = {row["name"]: row for row in result["contenders"] if row["status"] == "ok"} if result else {}
    if result is None or not rows.keys() >= set(goal.needs):
        return Verdict(goal, None)
    return Verdict(goal, goal.figure(rows, result["parameters"]))


def table(results: dict[str, Any]) -> str:
    """The goals as a table."""
    words = {True: "met", False: "NOT met", None: "not measured"}
    rows = [
        [v.goal.title, v.goal.workload, str(v.figure or "-"), f"<= {v.goal.limit:.2f}", words[v.met]]
        for v in judge(results)
    ]
    return "## Goals\n" + report.table(("goal", "workload", "measured", "limit", ""), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the goals of a results file; with --strict exit 1 unless each one measured is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="a JSON file that the suite wrote")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is not met or not measured")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text())
    print(f"{results['machine']}, torch {results['torch']}, mpinit {results['mpinit']}\n\n{table(results)}")
    if options.strict and not all(verdict.met for verdict in judge(results)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
