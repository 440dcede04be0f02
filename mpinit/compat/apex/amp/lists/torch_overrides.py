"""Lists of ``torch``."""

from __future__ import annotations

import torch as MODULE

from .....functions.cast_lists import Cast
from ._policy import names_under

__all__ = ["CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

FP16_FUNCS = names_under("torch", Cast.LOWER_PRECISION)
FP32_FUNCS = names_under("torch", Cast.FP32)
SEQUENCE_CASTS = [name for name in names_under("torch", Cast.PROMOTE) if name in ("cat", "stack")]
CASTS = [name for name in names_under("torch", Cast.PROMOTE) if name not in SEQUENCE_CASTS]
