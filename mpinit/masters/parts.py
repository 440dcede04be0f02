"""Steps that are done in parts: what an optimizer counts, it counts once a step."""

from __future__ import annotations

from typing import final

import torch
from torch.optim import Optimizer


@final
class Numbers:
    """The numbers that an optimizer keeps for itself or for a group, such as ``group["step"]``, as they are now.

    Put back before every part of a step but the first, they are in the end what one step leaves, and every part sees
    what the first one saw.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        owners = [vars(optimizer), *optimizer.param_groups]
        self._numbers = [
            (owner, key, value.clone() if isinstance(value, torch.Tensor) else value)
            for owner in owners
            for key, value in owner.items()
            if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make them what they were."""
        for owner, key, value in self._numbers:
            if isinstance(value, torch.Tensor):
                owner[key].copy_(value)
            else:
                owner[key] = value
