"""``apex.amp``, implemented with mpinit's functions. Under O1 it uses the stricter "apex" cast policy."""

from ....amp import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ._amp_state import _amp_state, master_params
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts, init, scale_loss

# ROCm's names. Both kinds cast to the 16-bit dtype of the session, bfloat16 at O4.
bfloat16_function = half_function
register_bfloat16_function = register_half_function

__all__ = ["_amp_state", "disable_casts", "init", "initialize", "load_state_dict", "master_params", "scale_loss"]
__all__ += ["bfloat16_function", "float_function", "half_function", "promote_function", "state_dict"]
__all__ += ["register_bfloat16_function", "register_float_function", "register_half_function"]
__all__ += ["register_promote_function"]
