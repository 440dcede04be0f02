"""Who wants to be told what becomes of an optimizer's backward passes and steps: nobody, unless asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..scaling.scaler import LossScaler


class Observer(ABC):
    """Told of what has happened; reads, and changes nothing."""

    @abstractmethod
    def backward_ended(self, loss: torch.Tensor, scaler: LossScaler) -> None:
        """A scaled backward pass is over, gradients are unscaled and added up, and the scale has not moved yet.

        Args:
            loss: what was given to ``scale_loss``.
            scaler: what scaled it.
        """

    @abstractmethod
    def step_ended(self, skipped: bool | torch.Tensor) -> None:
        """A step is over, and its gradients are still there.

        Args:
            skipped: whether it was; a 0-dimensional tensor above 0 where a kernel on the device decided that.
        """
