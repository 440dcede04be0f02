"""The loss scalers of manual mixed precision; amp's are elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class _Scaler(ABC):
    """What the two kinds share: a factor, and what is done with it."""

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = float(scale)

    @property
    def loss_scale(self) -> float:
        """The factor the loss is multiplied by."""
        return self.cur_scale

    @abstractmethod
    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether gradients are found to hold inf or nan."""

    @abstractmethod
    def update_scale(self, overflow: bool) -> None:
        """Move the scale after a step whose gradients overflowed, or did not."""

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward on the scaled loss."""
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain numbers."""
        return dict(vars(self))

    def load_state(self, saved: Any) -> None:
        """Take over a saved state: the dict of :meth:`state`, or a scaler as old checkpoints hold it."""
        values = saved if isinstance(saved, dict) else vars(saved)
        vars(self).update({name: values[name] for name in vars(self) if name in values})


class LossScaler(_Scaler):
    """A loss scale that never moves.

    Args:
        scale: the factor.
    """

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """False: a static scale is not checked."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """A static scale stays."""


class DynamicLossScaler(_Scaler):
    """A loss scale that backs off on overflow and grows after a row of good steps.

    Args:
        init_scale: the first scale.
        scale_factor: the factor of both moves.
        scale_window: good steps between growths.
    """

    def __init__(self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = float(scale_factor)
        self.scale_window = int(scale_window)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether any gradient holds inf or nan."""
        return any(p.grad is not None and not bool(torch.isfinite(p.grad).all()) for p in params)

    def update_scale(self, overflow: bool) -> None:
        """Move the scale after a step.

        Args:
            overflow: whether that step's gradients overflowed.
        """
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1.0)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
