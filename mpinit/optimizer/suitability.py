"""Optimizers that cannot be taken as they are: refused before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch.optim import Optimizer

from ..plan import Plan

# What sharpness-aware optimizers call the two halves of their step.
_HALVES: Final = ("first_step", "second_step")


def check_optimizers(optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Refuse optimizers that do with an overflow what cannot be taken back.

    Raises:
        ValueError: an optimizer steps in two halves, and the scale is dynamic.
    """
    if not plan.scaling.dynamic:
        return
    for optimizer in optimizers:
        if all(callable(getattr(type(optimizer), name, None)) for name in _HALVES):
            raise ValueError(
                f"{type(optimizer).__name__} steps in two halves ({' and '.join(_HALVES)}), and with a dynamic loss "
                "scale an overflow could skip the one and not the other, which would leave inf in the weights: use "
                "bfloat16 (opt_level='O4' or 'O5'), or a fixed loss_scale such as 128.0"
            )
