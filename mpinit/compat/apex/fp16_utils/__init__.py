"""Manual mixed precision: helpers that convert models and FP16_Optimizer, which keeps float32 masters."""

from __future__ import annotations

from . import fp16util
from .fp16_optimizer import FP16_Optimizer
from .fp16util import *  # noqa: F403 - its __all__ lists the names one by one
from .loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "FP16_Optimizer", "LossScaler"]
__all__ += fp16util.__all__
