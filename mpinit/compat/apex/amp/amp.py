"""``amp.init``, which patches functions without naming models, and registration of users' functions."""

from __future__ import annotations

import torch

from .... import amp as mp
from . import lists
from ._amp_state import _amp_state
from ._handles import AmpHandle, NoOpHandle

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


class UnknownModels(torch.nn.Module):
    """Stands for the models of ``amp.init``, which is not told what they are."""


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle | NoOpHandle:
    """Patch torch's functions, until the handle that is returned puts them back; losses are for ``amp.initialize``.

    Args:
        enabled: with False nothing happens, and the handle does nothing.
        loss_scale: accepted; the handle refuses to scale a loss, and says what does.
        enable_caching: accepted; a weight's cast is kept for the length of a forward only.
        verbose: log the first cast of each kind.
        allow_banned: let functions run that are banned in float16.

    Returns:
        The handle.
    """
    _amp_state.disabled = not enabled
    if not enabled:
        return NoOpHandle()
    lists.register_edits()
    anchor = UnknownModels()
    config = {"cast_policy": "apex", "allow_banned": allow_banned or not lists.functional_overrides.BANNED_FUNCS}
    mp.initialize(anchor, opt_level="O1", verbosity=2 if verbose else 1, config=config)
    _amp_state.init_handle = AmpHandle(anchor)
    return _amp_state.init_handle
