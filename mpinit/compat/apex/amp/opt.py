"""OptimWrapper: an optimizer with several losses, in apex's first interface."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from .... import amp as mp

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """An optimizer whose losses are scaled one after the other, each with a scale of its own.

    ``handle.wrap_optimizer`` makes it. All attributes but these are the optimizer's.

    Args:
        optimizer: the optimizer.
        amp_handle: the handle of ``amp.init``.
        num_loss: number of losses between two steps.
    """

    def __init__(self, optimizer: Optimizer, amp_handle: Any, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped optimizer, under the name by which mpinit finds it."""
        return self._optimizer

    @contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the next loss, scaled, for ``backward()``.

        Args:
            loss: the loss, a tensor with one element.

        Raises:
            RuntimeError: more losses than ``num_loss`` since the last step.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise RuntimeError(
                f"scale_loss was called {self._loss_idx + 1} times since the last step, and this optimizer was wrapped "
                f"for {self._num_loss}: handle.wrap_optimizer(optimizer, num_loss={self._loss_idx + 1})"
            )
        loss_id, self._loss_idx = self._loss_idx, self._loss_idx + 1
        with mp.scale_loss(loss, self._optimizer, loss_id) as scaled:
            yield scaled

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, or skip the step after an overflow in any of the losses.

        Raises:
            NotImplementedError: a closure was passed while amp is active.
        """
        self._loss_idx = 0
        if closure is not None and self._amp_handle.is_active():
            raise NotImplementedError("the optimizer of amp.init takes no closure: call backward(), then step()")
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # while a copy or a pickle is made
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
