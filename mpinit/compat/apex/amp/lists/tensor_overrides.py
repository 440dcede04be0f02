"""Lists of ``torch.Tensor``'s methods."""

from __future__ import annotations

from torch import Tensor as MODULE

from .....functions.cast_lists import Cast
from ._policy import names_under

__all__ = ["CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

FP16_FUNCS = names_under("torch.Tensor", Cast.LOWER_PRECISION)
FP32_FUNCS = names_under("torch.Tensor", Cast.FP32)
CASTS = names_under("torch.Tensor", Cast.PROMOTE)
SEQUENCE_CASTS: list[str] = []
