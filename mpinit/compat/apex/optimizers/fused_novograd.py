"""FusedNovoGrad: stochastic gradients with layer-wise normalisation (Ginsburg et al., arXiv:1905.11286)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ._layerwise import LayerwiseOptimizer


class FusedNovoGrad(LayerwiseOptimizer):
    """NovoGrad. With ``reg_inside_moment=True, bias_correction=False, grad_averaging=False`` it is the paper's.

    Args:
        params: parameters or groups.
        lr: the learning rate.
        bias_correction: whether the running averages are corrected for their start.
        betas: decay of the running averages of the gradient and of its norm.
        eps: added to the denominator.
        weight_decay: its strength.
        amsgrad: refused, as apex does.
        reg_inside_moment: normalise the gradient and add the weight decay before the first moment, not after.
        grad_averaging: weigh the new gradient by ``1 - beta1`` and not by 1.
        norm_type: 2, or 0 for the largest absolute value.
        init_zero: start the running norm at 0 and not at the first gradient's norm.
        set_grad_none: what ``zero_grad()`` does when it is not told.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedNovoGrad([weight], lr=0.1)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedNovoGrad does not support amsgrad=True; leave it out")
        if norm_type not in (0, 2):
            raise RuntimeError(f"FusedNovoGrad(norm_type={norm_type!r}): give 2, or 0 for the infinity norm")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)
        self.reg_inside_moment = reg_inside_moment
        self.set_grad_none = set_grad_none

    def _shrink(self) -> None:
        """No limit."""

    def _change(self, group: dict[str, Any], state: dict[str, Tensor], weight: Tensor, grad: Tensor) -> Tensor:
        mean, norm = self._moments(group, state, grad)
        update: Tensor = group["lr"] * self._update(group, weight, grad, mean, norm)
        return update

    def _moments(self, group: dict[str, Any], state: dict[str, Tensor], grad: Tensor) -> tuple[Tensor, Tensor]:
        """The first moment, not yet moved, and the running norm, moved by this gradient."""
        present = grad.norm(2 if group["norm_type"] == 2 else float("inf"))
        if not state:
            state["exp_avg"] = torch.zeros_like(grad)
            state["exp_avg_norm"] = torch.zeros_like(present) if group["init_zero"] else present.clone()
        norm, beta2 = state["exp_avg_norm"], group["betas"][1]
        if group["norm_type"] == 2:
            norm.copy_((beta2 * norm.square() + (1 - beta2) * present.square()).sqrt())
        else:
            norm.copy_(beta2 * norm + (1 - beta2) * present)
        return state["exp_avg"], norm

    def _update(self, group: dict[str, Any], weight: Tensor, grad: Tensor, mean: Tensor, norm: Tensor) -> Tensor:
        beta1, beta2 = group["betas"]
        decay, step = group["weight_decay"], group["step"]
        correction1 = correction2 = 1.0
        if group["bias_correction"]:
            correction1, correction2 = 1 - beta1**step, (1 - beta2**step) ** 0.5
        denominator = norm / correction2 + group["eps"]
        share = 1 - beta1 if group["grad_averaging"] else 1.0
        if self.reg_inside_moment:
            mean.mul_(beta1).add_(grad / denominator + decay * weight, alpha=share)
            return mean.div(correction1)
        mean.mul_(beta1).add_(grad, alpha=share)
        return mean.div(correction1).div(denominator).add(weight, alpha=decay)
