"""Gradients as lists of tensors: what they are."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

import torch

_DTYPE: Final = attrgetter("dtype")
_IS_SPARSE: Final = attrgetter("is_sparse")
_DEVICE: Final[Any] = torch.Tensor.get_device
_FLOAT32: Final = {torch.float32}
_NO: Final = {False}
_PLAIN: Final = {torch.Tensor}


def as_float32(gradient: torch.Tensor) -> torch.Tensor:
    """A 16-bit gradient in float32; any other as it is. Sparse ones are coalesced after the cast, in float32."""
    if gradient.dtype in (torch.float16, torch.bfloat16):
        gradient = gradient.float()
    return gradient.coalesce() if gradient.is_sparse and not gradient.is_coalesced() else gradient


def all_dense(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Whether all are there and dense."""
    try:
        return set(map(_IS_SPARSE, gradients)) == _NO
    except AttributeError:
        return False  # None is among them


def are_plain(gradients: Sequence[torch.Tensor | None], device: torch.device) -> bool:
    """Whether all are there, dense, float32 and on one device, as they nearly always are: asked on every step."""
    return (
        all_dense(gradients)
        and set(map(_DTYPE, gradients)) == _FLOAT32
        and set(map(type, gradients)) == _PLAIN
        and set(map(_DEVICE, gradients)) == {device.index if device.index is not None else -1}
    )
