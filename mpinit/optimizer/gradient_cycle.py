"""What is true of an optimizer's gradients from one ``zero_grad`` to the next."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import final

import torch

from ..scaling.scaler import LossScaler

Kept = list[torch.Tensor | None]


@final
class GradientCycle:
    """Whether gradients are sound, whether they are scaled at the moment, and what waits for the step.

    Attributes:
        found_inf: what the checks of this cycle's gradients found (0-dimensional, above 0 for inf or nan), or None.
        saw_scale_loss: whether a scaled backward pass has ended in this cycle.
        scaled_by: what the gradients on the weights are scaled by, between a backward pass of a GradScaler's loss and
            their unscaling; else None.
        saw_unscaling: whether there has been such an unscaling in this cycle.
        was_reached: whether any of those has left a gradient.
        is_agreed: whether ``found_inf`` is what all ranks together found.
    """

    def __init__(self) -> None:
        self.found_inf: torch.Tensor | None = None
        self.saw_scale_loss = self.was_reached = False
        self.scaled_by: LossScaler | None = None
        self.saw_unscaling = False
        self.is_agreed = False
        self._block: weakref.ref[object] | None = None
        self._aside: Kept | None = None
        self._pending: list[LossScaler] = []

    # -- the block ----------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a block with a scaled loss is open: gradients are scaled."""
        return self._block is not None and self._block() is not None

    def open(self, block: object, aside: Kept) -> None:
        """A block begins in which gradients are scaled.

        Args:
            block: whose life the block's is; dropped without having ended, by an interrupt say, it is open no more.
            aside: the gradients set aside.
        """
        self._aside = aside
        self._block = weakref.ref(block)

    def close(self) -> Kept | None:
        """The block ends.

        Returns:
            The gradients that were set aside; None where no block was open.
        """
        aside, self._aside, self._block = self._aside, None, None
        return aside

    def check_closed(self, what: str, instead: str) -> None:
        """Refuse what must not happen while gradients are scaled.

        Raises:
            RuntimeError: a block is open.
        """
        if self.is_open:
            raise RuntimeError(
                f"{what} was called inside `with mpinit.scale_loss(...)`, where the gradients are still scaled: "
                f"{instead}"
            )

    def look_for_scaled(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether any of these weights has a gradient that is scaled; all of them may have been cleared by hand."""
        if self.scaled_by is not None and all(weight.grad is None for weight in weights):
            self.scaled_by = None
        return self.scaled_by is not None

    def check_unscaled(self, what: str, weights: Iterable[torch.Tensor]) -> None:
        """Refuse what must not be done with scaled gradients.

        Raises:
            RuntimeError: backward() of a GradScaler's loss has left them, and nobody has unscaled them.
        """
        if self.look_for_scaled(weights):
            raise RuntimeError(
                f"{what}, but the gradients are still scaled, by a GradScaler: call scaler.step(optimizer), or "
                "scaler.unscale_(optimizer) first"
            )

    # -- overflow -----------------------------------------------------------------------------------------------

    def note(self, found_inf: torch.Tensor | None) -> None:
        """Add the outcome of one check."""
        self.found_inf = any_of([self.found_inf, found_inf])
        self.is_agreed = False

    def found(self, found_inf: torch.Tensor | None) -> None:
        """Take the outcome of a check of all gradients, in the place of those before."""
        self.found_inf = found_inf
        self.is_agreed = False

    def settle(self, found_inf: torch.Tensor) -> None:
        """Take what all ranks together found."""
        self.found_inf = found_inf
        self.is_agreed = True

    def forget_overflow(self) -> None:
        """The gradients that overflowed are gone."""
        self.found_inf = None
        self.is_agreed = False

    def cleared(self) -> None:
        """Nothing is left of the cycle."""
        self.found_inf = None
        self.saw_scale_loss = self.was_reached = self.saw_unscaling = self.is_agreed = False
        self.scaled_by = None
        if self._aside is not None:
            # Cleared inside of scale_loss, before its backward pass.
            self._aside[:] = [None] * len(self._aside)

    def saw_backward(self, reached: bool) -> None:
        """A scaled backward pass has ended, and has left gradients or not."""
        self.saw_scale_loss = True
        self.was_reached |= reached

    # -- updates put off ----------------------------------------------------------------------------------------

    def update_later(self, scaler: LossScaler) -> None:
        """A scale is to move at the step."""
        self._pending.append(scaler)

    def take_pending(self) -> list[LossScaler]:
        """The scales whose update was put off until now, each once; it is the caller's from here on."""
        pending, self._pending = list(dict.fromkeys(self._pending)), []
        return pending


def any_of(checks: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Whether any of several checks found inf or nan; None where none was made."""
    made = [check for check in checks if check is not None]
    return functools.reduce(torch.maximum, made) if made else None
