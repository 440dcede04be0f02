"""The context around a backward pass: the scaled loss going in, unscaled gradients coming out."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Any

import torch

from ..basics.logs import log
from ..distributed.sharding import is_distributed
from ..masters.masters import IN_FLOAT32
from ..scaling.scaler import LossScaler
from ..torch_internals.columns import have_grads
from ..torch_internals.running import is_read_freely
from .gradients import Done, Gradients
from .managed import ManagedOptimizer


class ScaledLoss:
    """The context ``scale_loss`` returns.

    All gradients of the session are scaled while the block is open, and unscaled at its end, whether their optimizers
    were named or not: a loss may reach parameters of others, as a generator's reaches its discriminator.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        scaler: LossScaler,
        optimizers: Sequence[ManagedOptimizer],
        others: Sequence[Gradients],
        delay_update: bool,
    ) -> None:
        self._loss = loss
        self._scaler = scaler
        self._optimizers = optimizers
        self._mine = [each.gradients for each in optimizers]
        self._others = others
        self._delay_update = delay_update
        # What is to notice that the scaled loss was not what backward() was called on; None: nothing has to.
        self._was_used: list[bool] | None = None

    def __enter__(self) -> torch.Tensor:
        if any(each.members.table.are_in_model for each in self._optimizers):
            raise RuntimeError(IN_FLOAT32.format("mpinit.scale_loss"))
        for gradients in (*self._mine, *self._others):
            if gradients.is_open and gradients.scaled_by is not None:
                for each in (*self._mine, *self._others):
                    each.drop()  # the end of the other may have been interrupted, and this be the next attempt
                raise RuntimeError(
                    "mpinit.scale_loss was entered inside another block for the same optimizer, whose gradients were "
                    "still scaled, and are dropped: close the outer block first, or add the losses up and call "
                    "backward() once. Where that block was interrupted, go on with the next step"
                )
            gradients.check_closed("mpinit.scale_loss", "move it after the with-block")
        for optimizer in self._optimizers:
            optimizer.before_backward()
        done: Done = set()
        begun: list[Gradients] = []
        are_new = True
        try:
            for gradients in (*self._mine, *self._others):
                begun.append(gradients)
                are_new &= gradients.scale(self, self._scaler, done) or gradients in self._others
            scaled = self._scaler.scale(self._loss)
            if are_new and scaled.requires_grad and not self._scaler.is_identity:
                self._watch(scaled)
            return scaled
        except BaseException:
            self._unscale(begun, set())
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        done: Done = set()
        if exc_type is None and self._was_used == []:
            self._check_used()
        try:
            for optimizer in self._optimizers:
                optimizer.after_backward()
        finally:
            found = self._unscale([*self._mine, *self._others], done)
            for optimizer in self._optimizers:
                optimizer.members.values.bind_gradients()
        if exc_type is None:
            self._finish(found)

    def _watch(self, scaled: torch.Tensor) -> None:
        """Note whether a backward pass goes through ``scaled``, where all gradients are of this block."""
        if not torch.compiler.is_compiling():
            was_used: list[bool] = []
            self._was_used = was_used
            scaled.register_hook(lambda _: was_used.append(True))  # type: ignore[no-untyped-call]

    def expect_no_use(self) -> None:
        """What is scaled alike by another block is what ``backward()`` is going to be called on."""
        self._was_used = None

    def _check_used(self) -> None:
        """Refuse gradients of the loss itself: divided by the scale they would hardly move a weight.

        Raises:
            RuntimeError: there are some. They are dropped.
        """
        if not any(have_grads(gradients.weights) for gradients in self._mine):
            return
        for gradients in (*self._mine, *self._others):
            gradients.drop()
        raise RuntimeError(
            "gradients came into the `with mpinit.scale_loss(loss, optimizer) as scaled_loss` block, but not from "
            "scaled_loss: call scaled_loss.backward() in it, not loss.backward(), whose gradients would be divided by "
            f"a scale of {self._scaler.loss_scale():g} that they were never multiplied by. The gradients were dropped"
        )

    def _unscale(self, gradients: Sequence[Gradients], done: Done) -> list[torch.Tensor]:
        found: list[torch.Tensor | None] = []

        def unscale(each: Gradients) -> None:
            found.append(each.unscale(self._scaler, done))

        with ExitStack() as stack:
            # Each even where another raises.
            for each in reversed(gradients):
                stack.callback(unscale, each)
        return [each for each in found if each is not None]

    def _finish(self, found: list[torch.Tensor]) -> None:
        scaler = self._scaler
        for found_inf in found:
            scaler.note(found_inf)
        # Only where looking costs no wait for the device.
        overflowed = any(is_read_freely(each.device) and each.item() > 0 for each in found)
        told = [each.note_overflow(self._loss, scaler, overflowed) for each in self._optimizers]
        # Before the step, ranks may have seen different overflows (no_sync), and their scales must not part.
        if not self._delay_update and not is_distributed():
            scaler.update()
        elif scaler.noted is not None:
            # Whichever of them steps first.
            for optimizer in self._optimizers:
                optimizer.update_later(scaler)
        if overflowed:
            log.info(
                "Gradient overflow: the next optimizer.step() is skipped; loss scale now %s%s",
                scaler.loss_scale(),
                "".join(f"; worst: {worst}" for worst in told if worst is not None),
            )


class Unscaled(nullcontext[Any]):
    """The context ``scale_loss`` returns where nothing is done to gradients: the loss as it is."""

    def expect_no_use(self) -> None:
        """What it is used for is not looked at."""
