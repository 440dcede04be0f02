"""The context around a backward pass: the scaled loss going in, sound gradients coming out."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from ..basics.logs import log
from ..distributed.sharding import is_distributed
from .scaler import LossScaler


class ScaledLoss:
    """The context ``scale_loss`` returns: the scaled loss going in, sound float32 gradients coming out.

    Args:
        loss: the loss.
        scaler: what scales it.
        controls: the optimizers whose gradients the backward pass inside computes.
        delay_update: leave the scale as it is until a later backward pass or step.
    """

    def __init__(self, loss: torch.Tensor, scaler: LossScaler, controls: Sequence[Any], delay_update: bool) -> None:
        self._loss = loss
        self._scaler = scaler
        self._controls = controls
        self._delay_update = delay_update
        self._kept: list[list[torch.Tensor | None] | None] = []

    def __enter__(self) -> torch.Tensor:
        for control in self._controls:
            control.check_no_block_is_open()
        try:
            for control in self._controls:
                self._kept.append(control.before_backward(self._scaler))
            return self._scaler.scale(self._loss)
        except BaseException:
            self._abandon()
            for control in self._controls:
                control.aside = None
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._finish() if exc_type is None else self._abandon()
        except BaseException:
            # Some gradients may be unscaled and added by now and others not: the cycle starts over.
            for control in self._controls:
                control.clear_gradients()
                control.aside = None
            raise
        finally:
            self._kept = []

    def _abandon(self) -> None:
        # Newest first: a parameter of two optimizers is kept by the one that took its gradient, the first.
        while self._kept:
            gradients = self._kept.pop()
            self._controls[len(self._kept)].abandon_backward(gradients)

    def _finish(self) -> None:
        controls = self._controls
        done: dict[int, torch.Tensor | None] | None = {} if len(controls) > 1 else None
        found = [
            control.after_backward(gradients, self._scaler, done)
            for control, gradients in zip(controls, self._kept, strict=True)
        ]
        for found_inf in found:
            if found_inf is not None:
                self._scaler.note(found_inf)
        # Before the step, ranks may have seen different overflows (no_sync), and their scales must not part.
        if not self._delay_update and not is_distributed():
            self._scaler.update()
        elif self._scaler.has_notes:
            # Whichever of them steps first.
            for control in controls:
                control.pending.append(self._scaler)
        self._log_overflow(found)

    def _log_overflow(self, found: list[torch.Tensor | None]) -> None:
        # Only where looking costs no wait for the device.
        if any(f is not None and f.device.type == "cpu" and f.item() > 0 for f in found):
            log.info(
                "Gradient overflow: the next optimizer.step() is skipped; loss scale now %s", self._scaler.loss_scale()
            )


class Unscaled:
    """The context ``scale_loss`` returns where mixed precision is disabled: the loss as it is."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __enter__(self) -> Any:
        return self._loss

    def __exit__(self, *_: object) -> None:
        return None
