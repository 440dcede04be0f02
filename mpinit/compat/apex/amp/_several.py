"""One loss over several optimizers, as apex has it: an overflow in one skips the steps of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch

from .... import amp as mp
from ... import _core


class SeveralOptimizers(AbstractContextManager[torch.Tensor]):
    """The context around the backward pass of a loss over several optimizers.

    mpinit lets each optimizer decide by its own gradients; apex skips them all. Here, what was found in one counts for
    the others, on the device and without waiting for it.

    Args:
        loss: the loss.
        optimizers: the optimizers, also of several ``initialize`` calls.
        loss_id: which of the losses it is.
        later: leave the scale as it is until a later backward pass or step.

    Raises:
        RuntimeError: an optimizer that was not initialised.
        ValueError: no such ``loss_id``, or sessions that do not share its scaler.
    """

    def __init__(self, loss: torch.Tensor, optimizers: Sequence[Any], loss_id: int, later: bool) -> None:
        self._optimizers = optimizers
        self._stack = ExitStack()
        groups = list(_by_shared_scaler(optimizers, loss_id))
        # Whichever is entered first ends last: it moves the scale, by what all of them found.
        self._blocks: list[Any] = [
            mp.scale_loss(loss, group, loss_id, delay_overflow_check=later or index > 0)
            for index, group in enumerate(groups)
        ]
        session = _core.session_of(optimizers[0])
        self._dynamic = session is not None and session.scaler(loss_id).rule.dynamic

    def __enter__(self) -> torch.Tensor:
        with ExitStack() as entered:
            scaled: list[torch.Tensor] = [entered.enter_context(block) for block in self._blocks]
            # All are scaled alike, and one is what backward() is called on.
            for block in self._blocks[1:]:
                block.expect_no_use()
            self._stack = entered.pop_all()
        return scaled[0]

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        swallowed = self._stack.__exit__(exc_type, exc, traceback)
        if exc_type is None and self._dynamic:
            _core.share_overflow(self._optimizers)
        return swallowed


def _by_shared_scaler(optimizers: Sequence[Any], loss_id: int) -> Iterator[list[Any]]:
    """The optimizers by session where the sessions share the scaler; else all in one, for mpinit to refuse."""
    sessions = [_core.session_of(optimizer) for optimizer in optimizers]
    known = [session for session in sessions if session is not None]
    if len(known) < len(sessions) or len({id(session.scaler(loss_id)) for session in known}) > 1:
        yield list(optimizers)
        return
    for session in dict.fromkeys(known):
        yield [optimizer for optimizer, own in zip(optimizers, sessions, strict=True) if own is session]
