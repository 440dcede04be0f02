"""Optimizers under apex's names: over torch's fused ones where there are such, clear torch code elsewhere."""

from __future__ import annotations

from typing import NoReturn

from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedSGD"]


def __getattr__(name: str) -> NoReturn:
    if name == "FusedNovoGrad":
        raise ImportError(
            "apex.optimizers.FusedNovoGrad is not part of the apex that mpinit provides: take FusedLAMB, which adapts "
            "to layers too, or torch.optim.AdamW, or install NVIDIA apex for it: mpinit then adds only what that lacks",
            name=f"{__name__}.{name}",
        )
    raise AttributeError(f"module 'apex.optimizers' has no attribute {name!r}")
