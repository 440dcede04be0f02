"""Masters that ``master_params`` has given out: until the next step what is done to them counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from ..masters.full import FullMasters
from ..masters.law import is_rounding
from ..masters.masters import Master
from .members import Members


@dataclass
class _Given:
    """One master, and what it and its weight were when they were last looked at."""

    master: Master
    version: int
    weight_version: int
    gradient: torch.Tensor | None


@final
class ExposedMasters:
    """The masters of one optimizer that are in the user's hands.

    A master's ``grad`` is its weight's. What is written to a master is rounded into its weight, and a gradient that
    was replaced counts, whichever of the two it was replaced on.

    Args:
        members: the optimizer's parameters.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._given: list[_Given] = []

    def give_out(self, weights: Iterable[nn.Parameter] | None = None) -> Iterator[nn.Parameter]:
        """Masters where weights have full ones; the weights themselves elsewhere.

        Args:
            weights: only what stands for these. Default: all members.
        """
        self.settle()
        members, table = self._members, self._members.table
        members.refresh()
        asked = members.weights if weights is None else list(weights)
        if not isinstance(table, FullMasters):
            yield from asked
            return
        table.exposed.add(self)
        known = {id(given.master) for given in self._given}
        for master in members.masters:
            if id(master) not in known:
                table.values(master)
                self._given.append(_Given(master, -1, -1, None))
        for given in self._given:
            self._bind(given)
        yield from map(members.inside, asked)
        self.settle()

    def _bind(self, given: _Given) -> None:
        weight, parameter = given.master.weight, given.master.parameter
        gradient = weight.grad
        if gradient is not None and gradient.dtype is not torch.float32:
            # Under DistributedDataParallel they arrive in the weight's type.
            gradient = weight.grad = self._members.table.held([gradient])[0]
        parameter.grad = gradient
        given.gradient = gradient
        given.version, given.weight_version = parameter._version, weight._version

    def settle(self) -> None:
        """Let weights be what was done to their masters.

        Raises:
            RuntimeError: a weight and its master were written to, or got other gradients, and differ.
        """
        for given in self._given:
            self._settle(given)

    @torch.no_grad()
    def _settle(self, given: _Given) -> None:
        weight, parameter = given.master.weight, given.master.parameter
        if parameter._version != given.version:
            both = weight._version != given.weight_version
            if both and not bool(is_rounding(weight.detach(), parameter.detach()).all()):
                raise RuntimeError(_BOTH.format(self._members.names.of(weight), "written to"))
            self._members.table.load(given.master, parameter.detach().clone())
        mine, theirs = parameter.grad, weight.grad
        if mine is not theirs and mine is not given.gradient:
            if given.gradient is None and theirs is not None and mine is not None:
                mine = theirs.add_(mine)  # a loss that reaches both: a penalty on masters, say
            elif theirs is not given.gradient:
                raise RuntimeError(_BOTH.format(self._members.names.of(weight), "given other gradients"))
            weight.grad = mine
        self._bind(given)

    def close(self) -> None:
        """A step is about to begin: nothing is done to masters between this and the next time they are given out."""
        if self._given:
            self.settle()
            for given in self._given:
                given.master.parameter.grad = None
            self._given = []
        self._members.table.exposed.discard(self)


_BOTH = (
    "the weight {0!r} and its float32 master of mpinit.master_params() were both {1}, differently: change one of the "
    "two"
)
