"""The parent's side: one process per contender, alive together, measured one at a time in turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .child import Child
from .workers import Dropped, Worker


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


class Player:
    """A contender's process and what it has answered so far."""

    def __init__(self, name: str, workload: str, size: dict[str, int], settings: Settings) -> None:
        self.name = name
        self.answers: dict[str, Any] = {}
        self.turns: list[dict[str, float]] = []
        self.worker = Worker(
            Child, settings.patience_s,
            contender=name, workload=workload, size=size, device=settings.device, seed=settings.seed,
        )  # fmt: skip


def play(workload: str, contenders: Iterable[str], size: dict[str, int], settings: Settings) -> list[dict[str, Any]]:
    """Measure contenders on a workload; a row of the results per contender, in the order given."""
    players = [Player(name, workload, size, settings) for name in contenders]
    out: dict[str, Dropped] = {}
    try:
        _each(players, out, lambda player: _prepare(player, settings), at_once=min(8, os.cpu_count() or 1))
        _each(players, out, lambda player: _calibrate(player, settings))
        for turn in range(settings.rounds):
            # Going first, or after a heavy neighbour, should be nobody's lot: the order turns round.
            order = players if turn % 2 else players[::-1]
            _each(order, out, lambda player: _take_turn(player, settings))
        _each(players, out, lambda player: player.answers.update(player.worker.ask("inspect")))
    finally:
        for player in players:
            player.worker.stop()
    return [_row(player, out.get(player.name)) for player in players]


def _each(players: list[Player], out: dict[str, Dropped], verb: Callable[[Player], None], at_once: int = 1) -> None:
    def attempt(player: Player) -> None:
        try:
            verb(player)
        except Dropped as reason:
            out[player.name] = reason
            player.worker.stop()

    present = [player for player in players if player.name not in out]
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(attempt, present))


def _prepare(player: Player, settings: Settings) -> None:
    player.answers.update(player.worker.ask("prepare", steps=settings.warmup))


def _calibrate(player: Player, settings: Settings) -> None:
    alone = player.worker.ask("turn", steps=2, untimed=1)
    player.answers["steps_per_turn"] = max(1, min(settings.max_steps, round(settings.round_ms / alone["total"])))


def _take_turn(player: Player, settings: Settings) -> None:
    untimed = 2 if settings.device == "cuda" else 1
    player.turns.append(player.worker.ask("turn", steps=player.answers["steps_per_turn"], untimed=untimed))


def _row(player: Player, dropped: Dropped | None) -> dict[str, Any]:
    if dropped is not None:
        return {"name": player.name, "status": dropped.status, "reason": str(dropped)}
    return {"name": player.name, "status": "ok", **player.answers, "turns_ms": player.turns}
