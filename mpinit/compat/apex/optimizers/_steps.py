"""What the optimizers share, those over torch's and those without: clearing gradients, and parts of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ClearsAsTold(torch.optim.Optimizer):
    """An optimizer whose constructor says what ``zero_grad()`` does; it stands before torch's class among the bases."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; without an argument, as the constructor's ``set_grad_none`` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def attribute_of(inner: str, name: str) -> Any:
    """A property that is an attribute of the object inside, readable and writable."""
    return property(
        lambda self: getattr(getattr(self, inner), name),
        lambda self, value: setattr(getattr(self, inner), name, value),
    )


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure returns, evaluated with gradients whatever surrounds the step; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
