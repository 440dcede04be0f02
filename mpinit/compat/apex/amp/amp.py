"""Registration of users' functions."""

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
