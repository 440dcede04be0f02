"""``apex.amp``, implemented with mpinit's functions. Under O1 it uses the stricter "apex" cast policy."""

from typing import NoReturn

from ...importing import refuse_missing
from ._amp_state import _amp_state, master_params
from .amp import *  # noqa: F403 - its __all__ lists the names one by one
from .amp import __all__ as _registration
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts, init, scale_loss

__all__ = [
    "_amp_state",
    "disable_casts",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "scale_loss",
    "state_dict",
]
__all__ += _registration


def __getattr__(name: str) -> NoReturn:
    refuse_missing(f"apex.amp.{name}", AttributeError)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
