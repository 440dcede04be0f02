"""OptimWrapper of the old interface: an optimizer whose losses take turns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Handle(Protocol):
    """What scales the losses: a handle of ``amp.init``."""

    def scale_loss(self, loss: torch.Tensor, optimizer: Any, loss_id: int = 0) -> AbstractContextManager[torch.Tensor]:
        """The context in which to run backward on the scaled loss."""


class OptimWrapper:
    """Hands everything through to the optimizer and adds ``scale_loss(loss)``.

    Args:
        optimizer: the optimizer.
        amp_handle: scales the losses.
        num_loss: how many losses are scaled between two steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, amp_handle: Handle, num_loss: int) -> None:
        self._optimizer = optimizer
        self._handle = amp_handle
        self._num_loss = num_loss
        self._next_loss = 0

    def scale_loss(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Scale the next loss of the turn.

        Raises:
            RuntimeError: there were more losses since the last step than were announced.
        """
        if self._next_loss >= self._num_loss:
            raise RuntimeError(
                f"scale_loss was called {self._next_loss + 1} times since the last step, but wrap_optimizer was given "
                f"num_loss={self._num_loss}; give it the number of losses there are"
            )
        self._next_loss += 1
        return self._handle.scale_loss(loss, self._optimizer, self._next_loss - 1)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer; the losses' turn starts again."""
        self._next_loss = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
