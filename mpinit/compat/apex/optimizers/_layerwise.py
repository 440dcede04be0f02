"""What the optimizers share whose update of a layer torch has no kernel for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._steps import ClearsAsTold, loss_of


class LayerwiseOptimizer(ClearsAsTold):
    """The loop over groups and layers, in float32; a subclass says in ``_change`` what a layer's step takes off it."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What the closure returned, or None.
        """
        loss = loss_of(closure)
        with torch.no_grad():
            shrink = self._shrink()
            for group in self.param_groups:
                self._step_group(group, shrink)
        return loss

    def _step_group(self, group: dict[str, Any], shrink: Tensor | None) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        group["step"] = group.get("step", 0) + 1
        for p in params:
            if p.grad.is_sparse:
                name = type(self).__name__
                raise RuntimeError(f"{name} does not support sparse gradients; use torch.optim.SparseAdam for them")
            weight, grad = p.float(), p.grad.float()
            if shrink is not None:
                grad = grad * shrink.to(grad.device)
            p.copy_(weight - self._change(group, self.state[p], weight, grad))

    @abstractmethod
    def _shrink(self) -> Tensor | None:
        """The factor that brings all gradients down to a limit; None where there is no limit."""

    @abstractmethod
    def _change(self, group: dict[str, Any], state: dict[str, Tensor], weight: Tensor, grad: Tensor) -> Tensor:
        """What this step subtracts from a weight: the update times the learning rate."""
