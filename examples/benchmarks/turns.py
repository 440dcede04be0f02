"""The parent's side: one process per contender, alive together, measured one at a time in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = __package__ or "examples.benchmarks"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Dropped(Exception):
    """A contender that takes no further part.

    Attributes:
        status: "unavailable" (it has no part here) or "failed".
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Settings:
    """How long and how often to measure.

    Attributes:
        size: "quick", "cpu" or "cuda".
        device: where.
        warmup: steps before anything is timed; the loss after them is compared.
        rounds: turns per contender.
        round_ms: about how long a turn lasts.
        max_steps: the most steps in a turn.
        patience_s: how long an answer may take.
        seed: of weights and data.
    """

    size: str
    device: str
    warmup: int
    rounds: int
    round_ms: float
    max_steps: int
    patience_s: float = 240.0
    seed: int = 0


@dataclass
class Player:
    """A child process and what it has answered so far."""

    name: str
    arguments: list[str]
    patience_s: float
    answers: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, float]] = field(default_factory=list)

    def start(self) -> None:
        environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, "1") | {"PYTHONPATH": _python_path()}
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by stop)
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE}.child", "--contender", self.name, *self.arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; raise Dropped where there is none."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        watchdog = threading.Timer(self.patience_s, self.process.kill)
        watchdog.start()
        try:
            stdin.write(json.dumps({"do": do, **request}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            raise Dropped("failed", f"the process ended while it was asked to {do}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        for status in ("unavailable", "failed"):
            if status in answer:
                raise Dropped(status, answer[status])
        return answer

    def _last_words(self) -> str:
        self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return lines[-1] if lines else f"exit status {self.process.returncode}"

    def stop(self) -> None:
        """End the process and close its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                pipe.close()


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def play(workload: str, contenders: Iterable[str], size: dict[str, int], settings: Settings) -> list[dict[str, Any]]:
    """Measure contenders on a workload; a row of the results per contender, in the order given."""
    arguments = ["--workload", workload, "--size", json.dumps(size)]
    arguments += ["--device", settings.device, "--seed", str(settings.seed)]
    players = [Player(name, arguments, settings.patience_s) for name in contenders]
    out: dict[str, Dropped] = {}
    try:
        _each(players, out, lambda player: _prepare(player, settings), at_once=os.cpu_count() or 1)
        for _ in range(settings.rounds):
            _each(players, out, lambda player: _take_turn(player, settings))
        _each(players, out, lambda player: player.answers.update(player.ask("inspect")))
    finally:
        for player in players:
            if hasattr(player, "process"):
                player.stop()
    return [_row(player, out.get(player.name)) for player in players]


def _each(players: list[Player], out: dict[str, Dropped], verb: Any, at_once: int = 1) -> None:
    def attempt(player: Player) -> None:
        try:
            verb(player)
        except Dropped as reason:
            out[player.name] = reason
            player.stop()

    present = [player for player in players if player.name not in out]
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(attempt, present))


def _prepare(player: Player, settings: Settings) -> None:
    player.start()
    player.answers.update(player.ask("prepare", steps=settings.warmup))
    alone = player.ask("turn", steps=1, untimed=1)
    player.answers["steps_per_turn"] = max(1, min(settings.max_steps, round(settings.round_ms / alone["total"])))


def _take_turn(player: Player, settings: Settings) -> None:
    untimed = 2 if settings.device == "cuda" else 1
    player.turns.append(player.ask("turn", steps=player.answers["steps_per_turn"], untimed=untimed))


def _row(player: Player, dropped: Dropped | None) -> dict[str, Any]:
    if dropped is not None:
        return {"name": player.name, "status": dropped.status, "reason": str(dropped)}
    return {"name": player.name, "status": "ok", **player.answers, "turns_ms": player.turns}
