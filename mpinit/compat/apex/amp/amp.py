"""``amp.init`` of the old interface, and registration of users' functions."""

from __future__ import annotations

from .... import amp as mp
from . import lists
from ._amp_state import _amp_state
from ._handles import AmpHandle, NoOpHandle, UnknownModels

__all__ = [
    "float_function",
    "half_function",
    "init",
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


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle | NoOpHandle:
    """Patch torch's functions without naming models: the old interface.

    Args:
        enabled: with False nothing happens, and the handle does nothing.
        loss_scale: "dynamic", or a static scale.
        enable_caching: accepted; a weight's cast is kept for the length of a forward only.
        verbose: log the first cast of each kind.
        allow_banned: let functions run that are banned in float16.

    Returns:
        The handle, whose ``scale_loss(loss, optimizer)`` scales a loss.
    """
    if not enabled:
        _amp_state.disabled = True
        return NoOpHandle()
    lists.register_edits()
    banned = allow_banned or not lists.functional_overrides.BANNED_FUNCS
    anchor = UnknownModels()
    mp.initialize(
        anchor,
        opt_level="O1",
        loss_scale=loss_scale,
        verbosity=2 if verbose else 1,
        config={"cast_policy": "apex", "allow_banned": banned},
    )
    _amp_state.disabled = False
    _amp_state.init_handle = AmpHandle(anchor)
    return _amp_state.init_handle
