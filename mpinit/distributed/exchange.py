"""Who reduces gradients over processes, and in what type."""

from __future__ import annotations

import torch

from .sharding import is_distributed


def arriving_gradient_dtype() -> torch.dtype | None:
    """The type in which gradients are to be added up on a 16-bit weight that has a float32 master.

    Returns:
        float32; None (any) where ranks may exchange gradients in buckets of the weights' type, which then lie in
        ``weight.grad``.
    """
    return None if is_distributed() else torch.float32
