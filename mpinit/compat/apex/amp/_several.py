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

    mpinit lets each optimizer decide by its own gradients; apex skips them all. Here, one that overflowed puts an inf
    among the gradients of the others before they are checked, on the device and without waiting for it. An
    optimizer without a gradient has none to put it in, and none to step by.

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
        if exc_type is None and self._dynamic:
            self._spread_overflow()
        return self._stack.__exit__(exc_type, exc, traceback)

    @torch.no_grad()
    def _spread_overflow(self) -> None:
        gradients = [_gradients(optimizer) for optimizer in self._optimizers]
        maxima = [norm for each in gradients if each for norm in torch._foreach_norm(each, float("inf"))]
        if not maxima:
            return
        device = maxima[0].device
        overflowed = ~torch.isfinite(torch.stack([maximum.float().to(device) for maximum in maxima])).all()
        for each in gradients:
            if each:
                one = each[0][(0,) * each[0].dim()]
                one.masked_fill_(overflowed.to(one.device), float("inf"))


def _by_shared_scaler(optimizers: Sequence[Any], loss_id: int) -> Iterator[list[Any]]:
    """The optimizers by session where the sessions share the scaler; else all in one, for mpinit to refuse."""
    sessions = [_core.session_of(optimizer) for optimizer in optimizers]
    known = [session for session in sessions if session is not None]
    if len(known) < len(sessions) or len({id(session.scaler(loss_id)) for session in known}) > 1:
        yield list(optimizers)
        return
    for session in dict.fromkeys(known):
        yield [optimizer for optimizer, own in zip(optimizers, sessions, strict=True) if own is session]


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    """The gradients inside a block: dense and real, sharing the gradients' memory, none empty."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    found = [_dense(weight.grad) for weight in weights if weight.grad is not None]
    return [gradient for gradient in found if gradient.numel()]


def _dense(gradient: Any) -> torch.Tensor:
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    gradient = gradient._values() if gradient.is_sparse else gradient
    dense: torch.Tensor = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return dense
