"""Optimizers under apex's names: over torch's fused ones where there are such, clear torch code elsewhere."""

from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]
