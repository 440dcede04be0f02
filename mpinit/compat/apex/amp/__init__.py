"""The amp that scripts know, over mpinit's own functions; its functions follow the stricter "apex" cast policy."""

from __future__ import annotations

from . import lists
from ._amp_state import _amp_state, master_params
from .amp import (
    float_function,
    half_function,
    init,  # noqa: F401 - refused, with what takes its place
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts, scale_loss

__all__ = [
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
