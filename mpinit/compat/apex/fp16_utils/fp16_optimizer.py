"""FP16_Optimizer: float32 masters and loss scaling around an optimizer of 16-bit parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....basics.dtypes import is_lower_precision
from ....basics.logs import log
from ..optimizers._shared import attribute_of
from .fp16util import clip_grad_norm, master_params_to_model_params, model_grads_to_master_grads
from .loss_scaler import DynamicLossScaler, LossScaler

_SAVED = ("dynamic_loss_scale", "overflow")


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

    def _take_group(self, group: dict[str, Any]) -> None:
        trained = [p for p in group["params"] if p.requires_grad]
        masters = {p: nn.Parameter(p.detach().clone().float()) for p in trained if is_lower_precision(p.dtype)}
        for p in masters.keys() & self.optimizer.state.keys():
            self.optimizer.state[masters[p]] = self.optimizer.state.pop(p)
        group["params"][:] = [masters.get(p, p) for p in group["params"]]
        self.fp16_groups.append(list(masters))
        self.fp32_from_fp16_groups.append(list(masters.values()))
        self.fp32_from_fp32_groups.append([p for p in trained if p not in masters])

    loss_scale = attribute_of("loss_scaler", "cur_scale")
    state = attribute_of("optimizer", "state")
    param_groups = attribute_of("optimizer", "param_groups")

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
            p.grad = None if set_grads_to_None else p.grad.detach().zero_()

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
            model_grads_to_master_grads(halves, masters)
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

    def step(self, closure: None = None) -> Any:
        """Step the masters and copy them into the model; after an overflow lower the scale and do nothing else.

        Raises:
            TypeError: a closure is given.
        """
        if closure is not None:
            raise TypeError(
                "FP16_Optimizer.step takes no closure here: mpinit.initialize(model, optimizer, 'O2') steps optimizers "
                "with closures"
            )
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            if self.verbose:
                log.info("FP16_Optimizer: overflow; step skipped, loss scale now %g", self.loss_scale)
            return None
        result: Any = self.optimizer.step()
        self._masters_to_model()
        return result

    def _masters_to_model(self) -> None:
        for halves, masters in zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True):
            master_params_to_model_params(halves, masters)

    def state_dict(self) -> dict[str, Any]:
        """Scaler, wrapped optimizer and masters; holds plain numbers and tensors only."""
        return {
            "loss_scaler": self.loss_scaler.state(),
            **{name: getattr(self, name) for name in _SAVED},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[p.detach() for p in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` (or apex's FP16_Optimizer) saved; masters go into the model too."""
        self.loss_scaler.load_state(state_dict["loss_scaler"])
        for name in _SAVED:
            setattr(self, name, state_dict[name])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for own, saved in zip(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"], strict=True):
            master_params_to_model_params(own, saved)
        self._masters_to_model()
