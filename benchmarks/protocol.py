"""The one way in which everything is measured: fresh processes that take turns in random order, until controls hold."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import tqdm

from . import machine
from .results import ROOT, Results, fingerprint, read
from .suite import Workload, workloads


@dataclass(frozen=True)
class Effort:
    """How much is done.

    Attributes:
        size: "quick" or "full".
        rounds: processes of each contender.
        most_rounds: up to which a workload is measured on whose controls do not hold.
        turns: of each process, fewer where they would take longer than ``limit_s``, but at least sixteen, or four where
            one takes a quarter of a second. Many short ones: where a neighbour slows a core down by turns, what is
            compared has to be close together.
        preloaded: what contenders need anyway and is slow to import.
        patience_s: how long an answer may take.
    """

    size: str
    rounds: int
    most_rounds: int
    turns: int
    limit_s: float
    preloaded: tuple[str, ...] = ()
    patience_s: float = 240.0


_SLOW: Final = ("torch._dynamo", "torch._inductor.compile_fx", "mpinit")
FULL: Final = Effort("full", rounds=5, most_rounds=15, turns=32, limit_s=0.35, preloaded=_SLOW)
QUICK: Final = Effort("quick", rounds=2, most_rounds=2, turns=3, limit_s=0.01)
LEAST_TURNS: Final = 16
# Of a contender that is many times slower than others no second digit is needed: they get its time, in more rounds.
OF_SLOW_ONES: Final = 4
SLOW_S: Final = 0.25
# Repetitions before those that count bring caches and branches back; a longer one does so by itself.
WARM_UP_S: Final = 0.003
WARMED_BY_ITSELF_S: Final = 0.012
# Of the interpreters that processes are forked from, one a round.
STARTING_MINUTES: Final = 1.5
# What is not timed, getting ready above all, may use every core.
AT_ONCE: Final = os.cpu_count() or 1


class Interpreters:
    """One interpreter for each round, started when it is first needed.

    Args:
        preloaded: modules that they import, besides torch, before they fork.
        native: they load mpinit's native code, too, where it is built.
    """

    def __init__(self, preloaded: Sequence[str], native: bool = False) -> None:
        self._words = ["--native"] * native + [*preloaded]
        self._started: dict[int, subprocess.Popen[str]] = {}

    def __enter__(self) -> Interpreters:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started.values():
            process.communicate()

    def ask(self, number: int, contenders: Sequence[str], at_once: int = 1, **request: Any) -> dict[str, Any]:
        """Have the processes of some contenders do something, a few at once; what each answers."""
        process = self._started.get(number) or self._start(number)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({**request, "contenders": contenders, "at_once": at_once}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            del self._started[number]
            reason = f"the interpreter ended with exit status {process.wait()}"
            return {contender: {"failed": reason} for contender in contenders}
        answers: dict[str, Any] = json.loads(line)
        return answers

    def _start(self, number: int) -> subprocess.Popen[str]:
        cache = ROOT / "runs" / "benchmarks" / "compiled"
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        process = self._started[number] = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.interpreter", *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **machine.ENVIRONMENT, **own, "PYTHONHASHSEED": str(number)},
        )
        return process


def run(
    effort: Effort,
    device: str,
    out: Path,
    names: Sequence[str] | None = None,
    contenders: Sequence[str] | None = None,
    fresh: bool = False,
) -> None:
    """Measure each workload that has no results of these sources yet, and write them as soon as they are there."""
    needs_native = device == "cpu" and effort.size == "full"
    if needs_native:
        build_native()
    with Interpreters(effort.preloaded, needs_native) as interpreters:
        run_with(interpreters, effort, device, out, names, contenders, fresh)


def build_native() -> None:
    """Build mpinit's native code where that can be done; results say whether it is there."""
    from mpinit.torch_internals.one_pass_build import build

    try:
        build()
    except (OSError, RuntimeError) as error:
        print(f"without native code: {error}", flush=True)


def run_with(
    interpreters: Interpreters,
    effort: Effort,
    device: str,
    out: Path,
    names: Sequence[str] | None = None,
    contenders: Sequence[str] | None = None,
    fresh: bool = False,
) -> None:
    """:func:`run` with interpreters that are there already."""
    source = fingerprint()
    efforts = {
        f"effort {name}": value for name, value in asdict(effort).items() if isinstance(value, str | int | float)
    }
    common = {**machine.describe(device), "native code": _native_code(), "source": source, **efforts}
    rows = {name: row for name, row in workloads(effort.size).items() if device in row.devices}
    chosen = [name for name, row in rows.items() if (row.target == "bench" if names is None else name in names)]
    there = {} if fresh else {name: _begun(out / f"{name}.json", rows[name], source) for name in chosen}
    begun = {name: results for name, results in there.items() if results is not None}
    left = [name for name in chosen if name not in begun or begun[name].common["finished"] == "no"]
    taking_part = {name: _taking_part(rows[name], contenders) for name in left}
    total = sum(_rounds(rows[name], effort)[0] * len(those) for name, those in taking_part.items())
    print(intention({name: rows[name] for name in left}, taking_part, effort), flush=True)
    with tqdm.tqdm(total=total, unit="process", smoothing=0.05) as bar:
        bar.set_postfix_str(f"{len(chosen) - len(left)} of {len(chosen)} workloads were there")
        for name in left:
            results, path = begun.get(name) or Results(name, rows[name]), out / f"{name}.json"
            results.common = {**common, "finished": "no", "date": datetime.now(UTC).isoformat(timespec="seconds")}
            measure(results, taking_part[name], effort, device, interpreters, bar, path)
            results.common["finished"] = "yes"
            results.write(path)


def _native_code() -> str:
    try:
        from mpinit.torch_internals.one_pass import describe_native
    except ImportError:
        return "not there"
    return describe_native()


def intention(rows: Mapping[str, Workload], taking_part: Mapping[str, Sequence[str]], effort: Effort) -> str:
    """What a run is going to do, and about how long that takes."""
    minutes = {name: row.minutes * len(taking_part[name]) / len(row.contenders) for name, row in rows.items()}
    lines = []
    for name, row in rows.items():
        those = f"{len(taking_part[name]):2} contenders x {_rounds(row, effort)[0]}"
        lines.append(f"  {name:18} {minutes[name]:3.1f} min, {those}: {row.title}")
    most = STARTING_MINUTES + sum(minutes.values())
    head = (
        f"{len(rows)} workloads, at most about {most:.0f} minutes on two quiet cores; stopped, it goes on where it was:"
    )
    return "\n".join([head, *lines]) if lines else "nothing is left to measure"


def _rounds(workload: Workload, effort: Effort) -> tuple[int, int]:
    """How many there are, and how many there may be."""
    return (workload.rounds, workload.rounds) if workload.rounds else (effort.rounds, effort.most_rounds)


def _taking_part(workload: Workload, contenders: Sequence[str] | None) -> list[str]:
    controls = {name for pair in workload.controls for name in pair}
    return [name for name in workload.contenders if contenders is None or name in contenders or name in controls]


def _begun(path: Path, workload: Workload, source: str) -> Results | None:
    """Results of these sources, all of them or of the rounds before a run was stopped."""
    results = read(path, workload) if path.exists() else None
    return results if results is not None and results.common.get("source") == source else None


def measure(
    results: Results,
    contenders: list[str],
    effort: Effort,
    device: str,
    interpreters: Interpreters,
    bar: Any,
    path: Path | None = None,
) -> None:
    """Rounds in each of which every contender has one process, until the controls hold or there were enough.

    Past those that there always are, none begins that might end after the workload's minutes.

    Args:
        path: where each round is written to as soon as it is over.
    """
    begin = 1 + max((run["round"] for runs in results.runs.values() for run in runs), default=-1)
    rounds, most_rounds = _rounds(results.workload, effort)
    bar.update(len(contenders) * min(begin, rounds))
    end, latest = time.monotonic() + 60 * results.workload.minutes, 0.0
    for number in range(begin, most_rounds):
        start = time.monotonic()
        if number >= rounds:
            if results.is_measurable() or start + latest > end:
                return
            bar.total += len(contenders)
        bar.set_description(f"{results.name}, round {number + 1}")
        left = [contender for contender in contenders if contender not in results.missing]
        Round(results, number, effort, device, interpreters).play(left)
        bar.update(len(contenders))
        latest = time.monotonic() - start
        if path is not None:
            results.write(path)


class Round:
    """One process of each contender, alive together and measured in turns, in an order that is drawn for each turn."""

    def __init__(self, results: Results, number: int, effort: Effort, device: str, interpreters: Interpreters) -> None:
        self.results, self.number, self.effort, self.interpreters = results, number, effort, interpreters
        self.words = {"workload": results.name, "size": effort.size, "device": device}
        self.draw = random.Random(f"{results.name} {number}")
        self.loops: dict[str, int] = {}
        self.turns: dict[str, int] = {}
        self.untimed: dict[str, int] = {}
        self.answers: dict[str, list[dict[str, Any]]] = {}

    def play(self, contenders: list[str]) -> None:
        """All of it; who fails takes no further part."""
        start = {**self.words, "patience_s": self.effort.patience_s}
        for contender, answer in self._ask(self._in_turn(contenders), at_once=AT_ONCE, start=start).items():
            self._plan(contender, answer["once"])
        for turn in range(max(self.turns.values(), default=0)):
            for contender in self._in_turn([name for name in self.answers if turn < self.turns[name]]):
                loops = {"turn": self.loops[contender], "untimed": self.untimed[contender]}
                for answer in self._ask([contender], **loops).values():
                    self.answers[contender].append(answer)
        for contender, answer in self._ask(list(self.answers), at_once=AT_ONCE, first=self.number == 0).items():
            self._end(contender, answer["facts"])

    def _in_turn(self, contenders: list[str]) -> list[str]:
        return self.draw.sample(contenders, len(contenders))

    def _plan(self, contender: str, once: float) -> None:
        repeat_s, limit_s = self.results.workload.repeat_s, self.effort.limit_s * self.results.workload.patience
        self.loops[contender] = max(1, round(repeat_s / max(once, 1e-7))) if once else 1
        fit = int(limit_s / (self.loops[contender] * once)) if once else 1
        least = LEAST_TURNS if once < SLOW_S else OF_SLOW_ONES
        self.turns[contender] = max(least, min(self.effort.turns, fit)) if once else 1
        is_short = 0 < once < WARMED_BY_ITSELF_S
        self.untimed[contender] = max(1, round(WARM_UP_S / once)) if is_short else 0
        self.answers[contender] = []

    def _ask(self, contenders: list[str], **request: Any) -> dict[str, dict[str, Any]]:
        answers = self.interpreters.ask(self.number, contenders, **request)
        for contender, answer in list(answers.items()):
            if "failed" in answer or "unavailable" in answer:
                self.results.add(contender, self.number, answers.pop(contender))
                self.answers.pop(contender, None)
        return answers

    def _end(self, contender: str, facts: dict[str, Any]) -> None:
        answers = self.answers[contender]
        wall_s, values = fmean(answer["wall_s"] for answer in answers), [answer["seconds"] for answer in answers]
        own = {"values": values, "loops": self.loops[contender], "wall_s": wall_s, "facts": facts}
        self.results.add(contender, self.number, own)
