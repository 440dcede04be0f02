"""The measuring of workloads: fresh processes that are timed in turns, in random order, until the controls are met."""

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
    """The extent of a run.

    Attributes:
        size: "quick" or "full".
        rounds: the number of processes of each contender.
        most_rounds: the largest number of rounds of a workload whose controls are not met.
        turns: the number of turns of each process. It is smaller if the turns would last longer than ``limit_s``, but
            at least 16, or 4 if a repetition lasts a quarter of a second. Turns are short and many, because on a shared
            machine a core's speed changes: times that are compared have to be close together.
        preloaded: modules that contenders need and that are slow to import. They are not imported for CUDA, because a
            process cannot use CUDA if its parent has initialized it.
        patience_s: the time limit for an answer of a process.
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
# A contender with repetitions of SLOW_S or longer has only this many turns: its ratio needs fewer digits, and the time
# is used for more rounds.
TURNS_IF_SLOW: Final = 4
SLOW_S: Final = 0.25
# On CUDA turns last longer, and are fewer: a process that has waited begins slowly, by more than a step.
CUDA_TURNS: Final = 12
CUDA_REPEAT_S: Final = 0.06
CUDA_WARM_UP_S: Final = 0.03
# Untimed repetitions before each turn fill the caches again. Repetitions of WARMED_BY_ITSELF_S or longer need none.
WARM_UP_S: Final = 0.003
WARMED_BY_ITSELF_S: Final = 0.012
# The time to start the interpreters that processes are forked from, one for each round.
STARTING_MINUTES: Final = 1.5
# How many processes work at the same time while nothing is timed, as when they are prepared.
AT_ONCE: Final = os.cpu_count() or 1


class Interpreters:
    """One interpreter for each round, started when it is first needed.

    Args:
        preloaded: modules that they import, besides torch, before they fork.
        native: whether they load mpinit's native code, if it is built.
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
        """Send a request to the processes of some contenders, ``at_once`` of them at a time; return their answers."""
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
    """Measure each workload that has no results of the present sources yet; write the results after each round."""
    needs_native = device == "cpu" and effort.size == "full"
    if needs_native:
        build_native()
    with Interpreters(effort.preloaded if device == "cpu" else (), needs_native) as interpreters:
        run_with(interpreters, effort, device, out, names, contenders, fresh)


def build_native() -> None:
    """Build mpinit's native code if there is a compiler; the metadata of results name it."""
    from mpinit.torch_internals.native_build import build

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
    """Do the same as :func:`run` with interpreters that the caller has made."""
    source = fingerprint()
    efforts = {
        f"effort {name}": value for name, value in asdict(effort).items() if isinstance(value, str | int | float)
    }
    common = {**machine.describe(device), "native code": _native_code(), "source": source, **efforts}
    rows = {name: row for name, row in workloads(effort.size).items() if device in row.devices}
    chosen = [name for name, row in rows.items() if (row.target == "bench" if names is None else name in names)]
    earlier = {} if fresh else {name: _earlier(out / f"{name}.json", rows[name], source) for name in chosen}
    begun = {name: results for name, results in earlier.items() if results is not None}
    remaining = [name for name in chosen if name not in begun or begun[name].common["finished"] == "no"]
    measured = {name: _measured_contenders(rows[name], contenders) for name in remaining}
    total = sum(_rounds(rows[name], effort)[0] * len(those) for name, those in measured.items())
    print(announcement({name: rows[name] for name in remaining}, measured, effort), flush=True)
    with tqdm.tqdm(total=total, unit="process", smoothing=0.05) as bar:
        bar.set_postfix_str(f"{len(chosen) - len(remaining)} of {len(chosen)} workloads were measured before")
        for name in remaining:
            results, path = begun.get(name) or Results(name, rows[name]), out / f"{name}.json"
            results.common = {**common, "finished": "no", "date": datetime.now(UTC).isoformat(timespec="seconds")}
            measure(results, measured[name], effort, device, interpreters, bar, path)
            results.common["finished"] = "yes"
            results.write(path)


def _native_code() -> str:
    try:
        from mpinit.torch_internals.native import describe_native
    except ImportError:
        return "not there"
    return describe_native()


def announcement(rows: Mapping[str, Workload], measured: Mapping[str, Sequence[str]], effort: Effort) -> str:
    """List the workloads that a run is going to measure, with their contenders and minutes."""
    minutes = {name: row.minutes * len(measured[name]) / len(row.contenders) for name, row in rows.items()}
    lines = []
    for name, row in rows.items():
        those = f"{len(measured[name]):2} contenders x {_rounds(row, effort)[0]}"
        lines.append(f"  {name:18} {minutes[name]:3.1f} min, {those}: {row.title}")
    most = STARTING_MINUTES + sum(minutes.values())
    head = f"{len(rows)} workloads, at most about {most:.0f} minutes on two quiet cores; a stopped run continues:"
    return "\n".join([head, *lines]) if lines else "nothing is left to measure"


def _rounds(workload: Workload, effort: Effort) -> tuple[int, int]:
    """Return the number of rounds of a workload, and the largest number if its controls are not met."""
    return (workload.rounds, workload.rounds) if workload.rounds else (effort.rounds, effort.most_rounds)


def _measured_contenders(workload: Workload, contenders: Sequence[str] | None) -> list[str]:
    """Return the contenders of a workload that were chosen on the command line (None: all), and its controls."""
    controls = {name for pair in workload.controls for name in pair}
    return [name for name in workload.contenders if contenders is None or name in contenders or name in controls]


def _earlier(path: Path, workload: Workload, source: str) -> Results | None:
    """Return earlier results of the present sources, complete or not; None without any."""
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
    """Run rounds, with one process of every contender in each, until the controls are met or the limit is reached.

    After the first ``effort.rounds`` rounds, a round begins only if it can end within the workload's minutes.

    Args:
        path: the file that is written after each round.
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
        present = [contender for contender in contenders if contender not in results.missing]
        Round(results, number, effort, device, interpreters).run(present)
        bar.update(len(contenders))
        latest = time.monotonic() - start
        if path is not None:
            results.write(path)


class Round:
    """A round: one process of each contender. All are alive together, and timed in turns, each time in a new order."""

    def __init__(self, results: Results, number: int, effort: Effort, device: str, interpreters: Interpreters) -> None:
        self.results, self.number, self.effort, self.interpreters = results, number, effort, interpreters
        self.words = {"workload": results.name, "size": effort.size, "device": device}
        self.draw = random.Random(f"{results.name} {number}")
        self.loops: dict[str, int] = {}
        self.turns: dict[str, int] = {}
        self.untimed: dict[str, int] = {}
        self.answers: dict[str, list[dict[str, Any]]] = {}

    def run(self, contenders: list[str]) -> None:
        """Start, prepare, time and end all processes. A contender that fails is not measured any more."""
        start = {**self.words, "patience_s": self.effort.patience_s}
        for contender, answer in self._ask(self._shuffled(contenders), at_once=AT_ONCE, start=start).items():
            self._plan(contender, answer["once"])
        for turn in range(max(self.turns.values(), default=0)):
            for contender in self._shuffled([name for name in self.answers if turn < self.turns[name]]):
                loops = {"turn": self.loops[contender], "untimed": self.untimed[contender]}
                for answer in self._ask([contender], **loops).values():
                    self.answers[contender].append(answer)
        for contender, answer in self._ask(list(self.answers), at_once=AT_ONCE, first=self.number == 0).items():
            self._end(contender, answer["facts"])

    def _shuffled(self, contenders: list[str]) -> list[str]:
        return self.draw.sample(contenders, len(contenders))

    def _plan(self, contender: str, once: float) -> None:
        repeat_s, limit_s = self.results.workload.repeat_s, self.effort.limit_s * self.results.workload.patience
        warm_up_s, least = WARM_UP_S, LEAST_TURNS if once < SLOW_S else TURNS_IF_SLOW
        if self.words["device"] == "cuda" and repeat_s and self.effort.size == "full":
            repeat_s, warm_up_s, least = max(repeat_s, CUDA_REPEAT_S), CUDA_WARM_UP_S, min(least, CUDA_TURNS)
        self.loops[contender] = max(1, round(repeat_s / max(once, 1e-7))) if once else 1
        fit = int(limit_s / (self.loops[contender] * once)) if once else 1
        self.turns[contender] = max(least, min(self.effort.turns, fit)) if once else 1
        is_short = 0 < once < max(WARMED_BY_ITSELF_S, warm_up_s)
        self.untimed[contender] = max(1, round(warm_up_s / once)) if is_short else 0
        self.answers[contender] = []

    def _ask(self, contenders: list[str], **request: Any) -> dict[str, dict[str, Any]]:
        answers = self.interpreters.ask(self.number, contenders, **request)
        for contender, answer in list(answers.items()):
            if "failed" in answer or "unavailable" in answer:
                tqdm.tqdm.write(f"{self.results.name}: {contender}: {answer.get('failed') or answer['unavailable']}")
                self.results.add(contender, self.number, answers.pop(contender))
                self.answers.pop(contender, None)
        return answers

    def _end(self, contender: str, facts: dict[str, Any]) -> None:
        answers = self.answers[contender]
        wall_s, values = fmean(answer["wall_s"] for answer in answers), [answer["seconds"] for answer in answers]
        own = {"values": values, "loops": self.loops[contender], "wall_s": wall_s, "facts": facts}
        self.results.add(contender, self.number, own)
