"""scale_loss and disable_casts."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from .... import amp as mp
from ... import _core
from ._amp_state import _amp_state

disable_casts = mp.disable_casts

__all__ = ["disable_casts", "scale_loss"]


def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[torch.Tensor]:
    """Return a context manager in which to run ``scaled_loss.backward()``.

    Args:
        loss: the loss, a tensor with one element.
        optimizers: the optimizer, or a list of those whose gradients the backward pass computes. An overflow in the
            gradients of one skips the steps of all.
        loss_id: the number of the loss, below ``num_losses``. Default 0.
        model: accepted and ignored.
        delay_unscale: True: more backward passes follow before the step. Default False.
        delay_overflow_check: the same as ``delay_unscale``.

    Returns:
        A context manager that yields the scaled loss.

    Raises:
        RuntimeError: an optimizer was not initialised.
        ValueError: there is no such ``loss_id``, or the optimizers' sessions do not share its scaler.
    """
    many = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    is_known = any(_core.session_of(optimizer) is not None for optimizer in many)
    if _amp_state.disabled and not is_known:
        return nullcontext(loss)
    later = delay_unscale or delay_overflow_check
    if len(many) == 1 or not is_known:
        return mp.scale_loss(loss, many, loss_id, delay_overflow_check=later)
    # The block that is entered first exits last. It alone updates the scale, after all blocks have checked gradients.
    blocks = [
        mp.scale_loss(loss, group, loss_id, delay_overflow_check=later or index > 0)
        for index, group in enumerate(_groups_by_session(many, loss_id))
    ]
    session: Any = _core.session_of(many[0])
    return _skip_together(blocks, many if session.scalers[loss_id].is_dynamic else [])


@contextmanager
def _skip_together(blocks: list[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Enter several blocks as one; after them, an overflow of one optimizer skips the steps of all.

    mpinit skips the steps of those optimizers whose own gradients overflowed; apex skips the steps of all. The overflow
    is passed on without a device sync.
    """
    with ExitStack() as entered:
        for block in blocks if len(blocks) > 1 else ():
            block.search_graph(None)
        scaled: list[torch.Tensor] = [entered.enter_context(block) for block in blocks]
        # Every block yields the loss times the same scale, and the user calls backward() on one of these.
        for block in blocks[1:]:
            block.expect_no_use()
        yield scaled[0]
    _core.share_overflow(optimizers)


def _groups_by_session(optimizers: Sequence[Any], loss_id: int) -> Iterator[list[Any]]:
    """Yield the optimizers of each session; if the sessions have different scalers, one list, which mpinit refuses."""
    sessions = [_core.session_of(optimizer) for optimizer in optimizers]
    known = [session for session in sessions if session is not None]
    if len(known) < len(sessions) or len({tuple(map(id, session.scalers[loss_id:][:1])) for session in known}) > 1:
        yield list(optimizers)
        return
    for session in dict.fromkeys(known):
        yield [optimizer for optimizer, own in zip(optimizers, sessions, strict=True) if own is session]
