"""Lists of ``torch.nn.functional``."""

from __future__ import annotations

import torch.nn.functional as MODULE

from .....functions.cast_lists import Cast
from ._policy import names_under

__all__ = ["BANNED_FUNCS", "FP16_FUNCS", "FP32_FUNCS", "MODULE"]

FP16_FUNCS = names_under("torch.nn.functional", Cast.LOWER_PRECISION)
FP32_FUNCS = names_under("torch.nn.functional", Cast.FP32)
# (name, message); emptied before initialize, the functions run in float16.
BANNED_FUNCS = [
    (name, f"{name} is banned in float16: use its with_logits variant, or amp.init(allow_banned=True)")
    for name in names_under("torch.nn.functional", Cast.BANNED)
]
