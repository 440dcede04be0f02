"""Steps that are done in parts: what an optimizer counts, it counts once a step."""

from __future__ import annotations

from typing import Any, final

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
        self._before = [
            (owner, {key: _copied(value) for key, value in owner.items() if _is_number(value)})
            for owner in (vars(optimizer), *optimizer.param_groups)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make them what they were, and remove what was not there."""
        for owner, numbers in self._before:
            for key in [key for key, value in owner.items() if _is_number(value) and key not in numbers]:
                del owner[key]
            for key, value in numbers.items():
                if isinstance(value, torch.Tensor):
                    owner[key].copy_(value)
                else:
                    owner[key] = value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
