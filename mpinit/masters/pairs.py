"""Pairs of a 16-bit weight and the float32 master that stands for it in optimizers, and a session's table of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Pair(ABC):
    """A weight and its master: one number in two places.

    Args:
        model_param: the weight, as it comes in.
        master_param: what stands for it in the groups of optimizers.

    Attributes:
        came_in: the weight's dtype before it was cast.
        holders: those who look at the pair, one for each optimizer that has the master in its groups.
        trained: what ``requires_grad`` of both sides was at the last look.
        clamps: whether the master is known to hold finite numbers beyond the weight's largest, which become that.
    """

    __slots__ = ("came_in", "clamps", "holders", "master_param", "model_param", "trained")

    def __init__(self, model_param: nn.Parameter, master_param: nn.Parameter) -> None:
        self.model_param = model_param
        self.master_param = master_param
        self.came_in = model_param.dtype
        self.holders: set[Any] = set()
        self.trained = model_param.requires_grad
        self.clamps = False

    @property
    @abstractmethod
    def readable_param(self) -> nn.Parameter:
        """The side whose numbers can be looked at between steps, and whose gradient the next step uses."""

    @abstractmethod
    def cast(self, dtype: torch.dtype, clamps: bool = False) -> None:
        """Cast the weight; no bit of what it held is lost to the pair.

        Args:
            dtype: the weight's new dtype.
            clamps: whether it holds finite numbers beyond the largest of ``dtype``, which become that largest.
        """

    @abstractmethod
    def values(self) -> torch.Tensor:
        """The master's float32 numbers; not to be written to."""

    @abstractmethod
    def load(self, values: torch.Tensor) -> None:
        """Set both sides from float32 numbers of the weight's shape."""

    @abstractmethod
    def follow_weight(self) -> None:
        """Somebody wrote to the weight: what changed in it replaces the master's, what did not keeps its low bits.

        What is again as it was before the first of several such calls gets its low bits back.
        """

    @abstractmethod
    def forget_before(self) -> None:
        """From here on what the master holds is what it was: a step has been done."""

    @abstractmethod
    def follow_master(self) -> None:
        """Somebody wrote to the master: round it into the weight."""

    @abstractmethod
    def clamp(self) -> bool:
        """Whether a weight that was not yet known to be too narrow became infinite of a finite master.

        It becomes its type's largest then, and clamps from here on.
        """

    @abstractmethod
    def agree(self) -> bool:
        """Whether the weight is its master's rounding."""

    @abstractmethod
    def restore(self, dtype: torch.dtype) -> None:
        """Give the weight its master's numbers and gradient in ``dtype``; harmless where it has them already."""

    @abstractmethod
    def follow_device(self) -> None:
        """The weight may have been moved: bring its master's numbers to where it is. For pairs that nobody steps."""

    @abstractmethod
    def let_go(self) -> None:
        """The weight goes on as a plain parameter of the type it has, with its gradient; the master is not needed."""


class PairTable:
    """A session's pairs, found from either side: one weight has one master, in however many optimizers."""

    def __init__(self) -> None:
        self._of: dict[int, Pair] = {}
        self._pairs: dict[Pair, None] = {}

    def __iter__(self) -> Iterator[Pair]:
        return iter(list(self._pairs))

    def __len__(self) -> int:
        return len(self._pairs)

    def first(self) -> Pair | None:
        """One of them, asked for on every step: the oldest; None where there is none."""
        return next(iter(self._pairs), None)

    def of(self, parameter: torch.Tensor) -> Pair | None:
        """The pair ``parameter`` belongs to, as its weight or as its master."""
        return self._of.get(id(parameter))

    def add(self, pair: Pair) -> None:
        """Take a pair in."""
        self._of[id(pair.model_param)] = self._of[id(pair.master_param)] = pair
        self._pairs[pair] = None

    def discard(self, pair: Pair) -> None:
        """Forget a pair; harmless where it is forgotten already."""
        self._pairs.pop(pair, None)
        for parameter in (pair.model_param, pair.master_param):
            self._of.pop(id(parameter), None)


def cast_with_gradient(pair: Pair, dtype: torch.dtype, clamps: bool) -> None:
    """:meth:`Pair.cast`; the weight's gradient goes along."""
    weight = pair.model_param
    gradient = weight.grad
    if gradient is not None:
        weight.grad = None
    pair.cast(dtype, clamps)
    if gradient is not None:
        weight.grad = gradient.to(weight.dtype)


def give_gradient(weight: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Make a gradient a plain parameter's own, in the parameter's dtype."""
    if gradient is not None or weight.grad is not None:
        weight.grad = None if gradient is None else gradient.to(weight.dtype)
