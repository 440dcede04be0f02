"""The context around a backward pass: the scaled loss going in, sound gradients coming out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, final

import torch

from ..basics.logs import log
from ..torch_internals.devices import is_read_freely
from .scaler import LossScaler

# By the id of a gradient that is unscaled already: what of it has just arrived.
Done = dict[int, torch.Tensor | None]


class TakesPart(ABC):
    """Who owns gradients that a scaled backward pass computes."""

    @abstractmethod
    def before_backward(self, block: object, scaler: LossScaler) -> None:
        """Set the gradients accumulated so far aside; the block is open from here on.

        Args:
            block: the context that asks; a block that is dropped without having ended is abandoned.
            scaler: what the loss is scaled by.

        Raises:
            RuntimeError: another block is open.
        """

    @abstractmethod
    def after_backward(self, scaler: LossScaler, done: Done | None) -> torch.Tensor | None:
        """Unscale and check what the backward pass left, add it to what was set aside, and close the block.

        Args:
            scaler: what the loss was scaled by.
            done: where several take part: the gradients that are unscaled already.

        Returns:
            The outcome of the check (0-dimensional, above 0 where inf or nan was found), or None where nothing was.
        """

    @abstractmethod
    def tell_of_backward(self, loss: torch.Tensor, scaler: LossScaler, overflowed: bool) -> str | None:
        """After :meth:`after_backward` and before the scale moves: tell whoever watches.

        Args:
            loss: what was scaled.
            scaler: what it was scaled by.
            overflowed: whether an overflow was found and reading that waited for nothing: it is recorded.

        Returns:
            What to say of the worst gradient where it is recorded and is one of this part's; otherwise None.
        """

    @abstractmethod
    def abandon_backward(self) -> None:
        """After an exception: put back what was set aside, and close the block; harmless where none is open."""

    @abstractmethod
    def start_over(self) -> None:
        """Drop every gradient and close the block: some may be unscaled by now and others not."""

    @abstractmethod
    def update_later(self, scaler: LossScaler) -> None:
        """The scale is to move at the next step."""

    @property
    @abstractmethod
    def ranks_may_differ(self) -> bool:
        """Whether other processes may find another overflow before the step."""


@final
class ScaledLoss:
    """The context ``scale_loss`` returns.

    Args:
        loss: the loss.
        scaler: what scales it.
        parts: whose gradients the backward pass inside computes.
        bystanders: who must not get gradients of a scaled loss without taking part.
        delay_update: leave the scale as it is until a later backward pass or step.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        scaler: LossScaler,
        parts: Sequence[TakesPart],
        bystanders: Bystanders,
        delay_update: bool,
    ) -> None:
        self._loss = loss
        self._scaler = scaler
        self._parts = parts
        self._bystanders = bystanders
        self._delay_update = delay_update

    def __enter__(self) -> torch.Tensor:
        begun: list[TakesPart] = []
        try:
            for part in self._parts:
                part.before_backward(self, self._scaler)
                begun.append(part)
            self._bystanders.before_backward(self._parts, self._scaler)
            return self._scaler.scale(self._loss)
        except BaseException:
            for part in reversed(begun):
                part.abandon_backward()
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._bystanders.after_backward()
            self._finish() if exc_type is None else self._abandon()
        except BaseException:
            for part in self._parts:
                part.start_over()
            raise

    def _abandon(self) -> None:
        # Newest first: a parameter of two optimizers is kept by the one that took its gradient, the first.
        for part in reversed(self._parts):
            part.abandon_backward()

    def _finish(self) -> None:
        parts, scaler = self._parts, self._scaler
        done: Done | None = {} if len(parts) > 1 else None
        found = [part.after_backward(scaler, done) for part in parts]
        for found_inf in found:
            if found_inf is not None:
                scaler.note(found_inf)
        # Only where looking costs no wait for the device.
        overflowed = any(f is not None and is_read_freely(f.device) and f.item() > 0 for f in found)
        told = [part.tell_of_backward(self._loss, scaler, overflowed) for part in parts]
        # Before the step, ranks may have seen different overflows (no_sync), and their scales must not part.
        if not self._delay_update and not any(part.ranks_may_differ for part in parts):
            scaler.update()
        elif scaler.has_notes:
            # Whichever of them steps first.
            for part in parts:
                part.update_later(scaler)
        if overflowed:
            log.info(
                "Gradient overflow: the next optimizer.step() is skipped; loss scale now %s%s",
                scaler.loss_scale(),
                "".join(f"; worst: {worst}" for worst in told if worst is not None),
            )


class Bystanders(ABC):
    """Parameters that a scaled loss may reach without anybody unscaling their gradients."""

    @abstractmethod
    def before_backward(self, parts: Sequence[TakesPart], scaler: LossScaler) -> None:
        """Take down the gradients of all who do not take part."""

    @abstractmethod
    def after_backward(self) -> None:
        """Take down which of them have been reached: their gradients must not come to a step."""


@final
class Unscaled:
    """The context ``scale_loss`` returns where mixed precision is disabled: the loss as it is."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __enter__(self) -> Any:
        return self._loss

    def __exit__(self, *_: object) -> None:
        return None
