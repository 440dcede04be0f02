"""Registration of users' functions."""

from .... import amp as mp

__all__ = [
    "bfloat16_function",
    "float_function",
    "half_function",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

float_function = mp.float_function
half_function = mp.half_function
promote_function = mp.promote_function
register_float_function = mp.register_float_function
register_half_function = mp.register_half_function
# ROCm's names. Both kinds cast to the 16-bit dtype of the session, bfloat16 at O4.
bfloat16_function = mp.half_function
register_bfloat16_function = mp.register_half_function
register_promote_function = mp.register_promote_function
