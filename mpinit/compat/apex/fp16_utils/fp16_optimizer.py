"""FP16_Optimizer: float32 masters and loss scaling around an optimizer of 16-bit parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....basics.dtypes import is_lower_precision
from .fp16util import clip_grad_norm, master_params_to_model_params
from .loss_scaler import DynamicLossScaler, LossScaler

_LOGGER = logging.getLogger("mpinit")

# From the scaler's first scale down to 1, and some more.
_MOST_EVALUATIONS = 64


class FP16_Optimizer:
    """Wraps an optimizer of 16-bit parameters: it then steps float32 masters of them.

    Call ``backward(loss)`` in place of ``loss.backward()``, then ``step()``.

    Args:
        init_optimizer: the optimizer; its groups are changed to hold masters.
        static_loss_scale: the loss scale, where it is not dynamic.
        dynamic_loss_scale: let the scale move.
        dynamic_loss_args: arguments of :class:`DynamicLossScaler`.
        verbose: log each skipped step.

    Example:
        >>> model = nn.Linear(2, 1).half()
        >>> optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=8.0)
        >>> optimizer.backward(model(torch.ones(1, 2).half()).float().sum())
        >>> optimizer.step()
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.fp16_groups: list[list[nn.Parameter]] = []
        self.fp32_from_fp16_groups: list[list[nn.Parameter]] = []
        self.fp32_from_fp32_groups: list[list[nn.Parameter]] = []
        for group in init_optimizer.param_groups:
            self._take_group(group)
        self.loss_scaler: DynamicLossScaler | LossScaler = (
            DynamicLossScaler(**(dynamic_loss_args or {})) if dynamic_loss_scale else LossScaler(static_loss_scale)
        )
        self.dynamic_loss_scale = dynamic_loss_scale
        self.overflow = False
        self.first_closure_call_this_step = True

    def _take_group(self, group: dict[str, Any]) -> None:
        halves, masters, floats = [], [], []
        for index, p in enumerate(group["params"]):
            if not p.requires_grad:
                continue
            if is_lower_precision(p.dtype):
                master = nn.Parameter(p.detach().clone().float())
                group["params"][index] = master
                halves.append(p)
                masters.append(master)
                if p in self.optimizer.state:
                    self.optimizer.state[master] = self.optimizer.state.pop(p)
            else:
                floats.append(p)
        self.fp16_groups.append(halves)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(floats)

    @property
    def loss_scale(self) -> float:
        """The present loss scale."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = float(value)

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups, which hold the masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    def _model_params(self) -> list[nn.Parameter]:
        groups = (*self.fp16_groups, *self.fp32_from_fp32_groups)
        return [p for group in groups for p in group]

    def _stepped_params(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of the model and of the masters.

        Args:
            set_grads_to_None: drop them rather than fill them with zeros.
        """
        for p in (*self._model_params(), *self._stepped_params()):
            if p.grad is None:
                continue
            if set_grads_to_None:
                p.grad = None
            else:
                p.grad = p.grad.detach().zero_()

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run backward on the scaled loss.

        Args:
            loss: a float32 or 16-bit loss.
            update_master_grads: unscale into the masters now; with False call :meth:`update_master_grads` after
                the last of several backwards.
            retain_graph: as in torch.
        """
        self.loss_scaler.backward(loss, retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Bring the model's gradients into the masters, unscaled; on overflow only remember it."""
        self.overflow = self.loss_scaler.has_overflow(self._model_params())
        if self.overflow:
            return
        for halves, masters in zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True):
            for p, master in zip(halves, masters, strict=True):
                master.grad = None if p.grad is None else p.grad.detach().clone().float()
        if self.loss_scale != 1.0:
            grads = [p.grad for p in self._stepped_params() if p.grad is not None]
            torch._foreach_mul_(grads, 1.0 / self.loss_scale)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | float:
        """Clip the masters' gradients by their norm.

        Returns:
            The norm before clipping; -1 after an overflow, where nothing is clipped.
        """
        if self.overflow:
            return -1.0
        return clip_grad_norm(self._stepped_params(), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The gradients that ``step()`` will use, a list for each group; None after an overflow."""
        if self.overflow:
            return None
        return [[p.grad for p in group["params"]] for group in self.optimizer.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and copy them into the model; after an overflow lower the scale and do nothing else.

        Args:
            closure: re-evaluates the model, calls :meth:`backward` and returns the loss. Where that overflows, it
                is evaluated again at a lower scale.

        Returns:
            What the closure returned, or None.
        """
        loss: Any
        if closure is not None:
            loss = self.optimizer.step(self._guarded(closure))
        else:
            self.loss_scaler.update_scale(self.overflow)
            if self.overflow:
                if self.verbose:
                    _LOGGER.info("FP16_Optimizer: overflow; step skipped, loss scale now %g", self.loss_scale)
                return None
            loss = self.optimizer.step()
        self._masters_to_model()
        return loss

    def _guarded(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            # The optimizer may have moved the masters since the last evaluation.
            self._masters_to_model()
            loss = closure()
            for _ in range(_MOST_EVALUATIONS):
                if not self.overflow:
                    return loss
                self.loss_scaler.update_scale(self.overflow)
                loss = closure()
            raise RuntimeError(
                f"the closure's gradients overflowed {_MOST_EVALUATIONS} times in a row, down to a loss scale of "
                f"{self.loss_scale:g}: they are inf or nan at any scale; look for the cause in the model or its data"
            )

        return evaluate

    def _masters_to_model(self) -> None:
        for halves, masters in zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True):
            master_params_to_model_params(halves, masters)

    def state_dict(self) -> dict[str, Any]:
        """Scaler, wrapped optimizer and masters; holds plain numbers and tensors only."""
        return {
            "loss_scaler": self.loss_scaler.state(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[p.detach() for p in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` (or apex's FP16_Optimizer) saved; masters go into the model too."""
        self.loss_scaler.load_state(state_dict["loss_scaler"])
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        with torch.no_grad():
            for own, saved in zip(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"], strict=True):
                for p, value in zip(own, saved, strict=True):
                    p.copy_(value)
        self._masters_to_model()
