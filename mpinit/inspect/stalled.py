"""Parameters that do not move: updates below half a unit in the last place of what stores them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..basics.dtypes import dtype_name
from ..basics.tables import counted
from ..session import Session
from .numbers import dense

# Above this share a parameter is called stalled as a whole.
_MOST = 0.9


@final
class Stalled(Mapping[str, float]):
    """What :func:`stalled` found: dotted name -> share of the elements with a gradient that never moved.

    Attributes:
        steps: how many steps were looked at; skipped ones do not count.
        stored_in: dotted name -> the name of the type that keeps its numbers between steps.
        help: what would let them move, in words; empty where everything moves.
    """

    def __init__(self, shares: Mapping[str, float], steps: int, stored_in: Mapping[str, str]) -> None:
        self._shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
        self.steps = steps
        self.stored_in = dict(stored_in)
        self.help = _help(self._shares, stored_in)

    def __getitem__(self, name: str) -> float:
        return self._shares[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shares)

    def __len__(self) -> int:
        return len(self._shares)

    def frozen(self) -> list[str]:
        """The names of those of which nearly nothing moved, the worst first."""
        return [name for name, share in self._shares.items() if share >= _MOST]

    def __str__(self) -> str:
        rows = [(name, share) for name, share in self._shares.items() if share > 0]
        lines = [
            f"{len(rows)} of {counted(len(self), 'parameter')} with elements that did not move in "
            f"{counted(self.steps, 'step')}"
        ]
        lines += [f"  {name}: {share:.0%} ({self.stored_in[name]})" for name, share in rows[:20]]
        if len(rows) > 20:
            lines.append(f"  and {len(rows) - 20} more")
        return "\n".join([*lines, *([self.help] if self.help else [])])


def _help(shares: Mapping[str, float], stored_in: Mapping[str, str]) -> str:
    bad = [name for name, share in shares.items() if share >= 0.5]
    narrow = [name for name in bad if stored_in[name] != "float32"]
    if narrow:
        return (
            f"{narrow[0]!r} is stored in {stored_in[narrow[0]]}, whose neighbouring numbers are further apart than the "
            "updates: give initialize master_weights=True (or 'split' in bfloat16), or keep its module in float32 "
            "(keep_fp32=[...])"
        )
    return (
        f"{bad[0]!r} is stored in float32 and its updates are below its last digit: raise the learning rate"
        if bad
        else ""
    )


@dataclass
class _Parameter:
    name: str
    stored_in: torch.dtype
    start: torch.Tensor
    moved: torch.Tensor
    has_gradient: torch.Tensor


@final
class _Movement:
    """Which elements have had a gradient, and which have moved, since it began to look."""

    def __init__(self, session: Session, optimizer: Optimizer) -> None:
        self._session = session
        self._steps: list[bool | torch.Tensor] = []
        self._rows: dict[nn.Parameter, _Parameter] = {}
        for weight in session.managed(optimizer).parameters():
            if weight.requires_grad:
                values = self._now(weight)
                nothing = torch.zeros_like(values, dtype=torch.bool)
                row = _Parameter(session.name_of(weight), values.dtype, values.clone(), nothing, nothing.clone())
                self._rows[weight] = row

    def _now(self, weight: nn.Parameter) -> torch.Tensor:
        master = self._session.masters.of(weight)
        values = None if master is None else self._session.float32_values(weight)
        return dense(weight.detach() if values is None else values)

    def backward_ended(self, loss: torch.Tensor, scaler: Any) -> None:
        return

    @torch.no_grad()
    def step_ended(self, skipped: bool | torch.Tensor) -> None:
        self._steps.append(skipped)
        for weight, row in self._rows.items():
            gradient = weight.grad
            if gradient is not None:
                there = dense(gradient.to_dense() if gradient.is_sparse else gradient) != 0
                done = ~(skipped > 0) if isinstance(skipped, torch.Tensor) else torch.tensor(not skipped)
                row.has_gradient |= there & done.to(there.device)
            row.moved |= self._now(weight) != row.start

    def result(self) -> Stalled:
        shares = {}
        for row in self._rows.values():
            meant = row.has_gradient
            if bool(meant.any()):
                shares[row.name] = float((~row.moved)[meant].double().mean())
        stored = {row.name: dtype_name(row.stored_in) for row in self._rows.values()}
        done = sum(not bool(skipped) for skipped in self._steps)
        return Stalled(shares, done, stored)


def stalled(optimizer: Optimizer, start: bool = False) -> Stalled | None:
    """Which parameters do not move, because every update is lost to rounding.

    In 16 bit without masters an update below half a unit in the last place changes nothing: bfloat16 has 8 bits, so a
    norm's weight of 1.0 stays 1.0 for ever at usual learning rates. Called with ``start=True`` it records what every
    parameter holds now, and is told of every step until it is called without; in between a step costs a look at every
    element. Elements that never had a gradient (the rows of an embedding that no batch used) don't count.

    Args:
        optimizer: an initialised optimizer.
        start: True begins (anew); False, the default, ends, and gives the result.

    Returns:
        None at the start; then a mapping of dotted name to share, the largest first.

    Raises:
        RuntimeError: it was not started, no step was done since, or the optimizer is not initialised.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.LayerNorm(4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        >>> model, optimizer = mpinit.initialize(model, optimizer, "O3", cast_model_type="bf16", verbosity=0)
        >>> mpinit.stalled(optimizer, start=True)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     with mpinit.scale_loss(model(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).square().mean(), optimizer) as loss:
        ...         loss.backward()
        ...     optimizer.step()
        >>> mpinit.stalled(optimizer)["weight"]
        1.0
        >>> mpinit.undo(model)
    """
    session = registry.session_of(optimizer)
    observers = session.managed(optimizer).observers
    running = [observer for observer in observers if isinstance(observer, _Movement)]
    if start:
        fresh = _Movement(session, optimizer)
        for old in running:
            observers.remove(old)
        observers.append(fresh)
        return None
    if not running:
        raise RuntimeError("nothing to compare with: call mpinit.stalled(optimizer, start=True) some steps before")
    result = running[0].result()
    if result.steps == 0:
        raise RuntimeError(
            "no step was done since mpinit.stalled(optimizer, start=True): call it again after some optimizer.step()"
        )
    observers.remove(running[0])
    return result
