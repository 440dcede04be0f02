"""Registration of users' functions, and what is said of ``amp.init``."""

from __future__ import annotations

from typing import Any, NoReturn

from .... import amp as mp

__all__ = [
    "float_function",
    "half_function",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

float_function = mp.float_function
half_function = mp.half_function
promote_function = mp.promote_function
register_float_function = mp.register_float_function
register_half_function = mp.register_half_function
register_promote_function = mp.register_promote_function


def init(*arguments: Any, **keywords: Any) -> NoReturn:
    """Raise the RuntimeError that says what takes its place."""
    raise RuntimeError(
        "amp.init, from before amp.initialize, is not part of the apex that mpinit provides: leave it out, call model, "
        "optimizer = amp.initialize(model, optimizer, opt_level='O1', num_losses=...), and scale each loss with "
        "amp.scale_loss(loss, optimizer, loss_id=...)"
    )
