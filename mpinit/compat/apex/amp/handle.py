"""scale_loss and disable_casts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .... import amp as mp
from ... import _core
from ._amp_state import _amp_state
from ._sessions import unwrapped
from ._several import SeveralOptimizers

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
    """The context in which to run ``scaled_loss.backward()``.

    Args:
        loss: the loss.
        optimizers: the optimizer, or a list of those whose gradients the backward pass computes; an overflow in one
            of them skips the steps of all.
        loss_id: which of ``num_losses`` it is.
        model: accepted, unused.
        delay_unscale: more backward passes follow before the step.
        delay_overflow_check: accepted, unused.

    Returns:
        A context manager that yields the scaled loss.
    """
    many = [unwrapped(each) for each in (optimizers if isinstance(optimizers, (list, tuple)) else [optimizers])]
    is_known = any(_core.session_of(optimizer) is not None for optimizer in many)
    if _amp_state.disabled and not is_known:
        return nullcontext(loss)
    for optimizer in many:
        stash = getattr(optimizer, "_amp_stash", None)
        if stash is not None:
            stash.lazy_init_called = True
    later = delay_unscale or delay_overflow_check
    if len(many) > 1 and is_known:
        return SeveralOptimizers(loss, many, loss_id, later)
    return mp.scale_loss(loss, many, loss_id, delay_overflow_check=later)
