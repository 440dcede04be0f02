"""FusedLAMB: layer-wise adaptive moments for large batches (You et al., arXiv:1904.00962)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ._shared import ClearsAsTold, loss_of


class FusedLAMB(ClearsAsTold):
    """LAMB with gradient pre-normalisation by the norm over all groups.

    Args:
        params: parameters or groups.
        lr: the learning rate.
        bias_correction: whether the running averages are corrected for their zero start.
        betas: decay of the two running averages.
        eps: added to the denominator.
        weight_decay: its strength. At 0 a group's updates are not scaled by the trust ratio, unless ``use_nvlamb``.
        amsgrad: refused, as apex does.
        adam_w_mode: decoupled weight decay rather than L2 regularisation.
        grad_averaging: weigh the new gradient by ``1 - beta1`` and not by 1.
        set_grad_none: what ``zero_grad()`` does when it is not told.
        max_grad_norm: gradients are scaled down to this norm over all groups; 0 for no limit.
        use_nvlamb: scale by the trust ratio also where there is no weight decay.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedLAMB([weight], lr=0.1)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support amsgrad=True; leave it out")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb

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
                params = [p for p in group["params"] if p.grad is not None]
                group["step"] = group.get("step", 0) + bool(params)
                for p in params:
                    grad = p.grad.float() if shrink is None else p.grad.float() * shrink.to(p.device)
                    self._step_one(group, p, grad)
        return loss

    def _shrink(self) -> Tensor | None:
        """The factor that brings the gradients of all groups together down to ``max_grad_norm``."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError("FusedLAMB does not support sparse gradients; use torch.optim.SparseAdam for them")
        limit = self.defaults["max_grad_norm"]
        if not grads or not limit:
            return None
        norms = torch._foreach_norm([grad.float() for grad in grads])
        norm = torch.stack([norm.to(grads[0].device) for norm in norms]).norm()
        return torch.clamp(limit / norm, max=1.0)

    def _step_one(self, group: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        weight, state = p.float(), self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        update = self._update(group, weight, grad, state)
        p.copy_(weight - group["lr"] * self._trust(group, weight, update) * update)

    def _update(self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        if decay and not self.adam_w_mode:
            grad = grad + decay * weight
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction1 = correction2 = 1.0
        if group["bias_correction"]:
            correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        update = mean.div(correction1).div(square.div(correction2).sqrt().add(group["eps"]))
        return update.add(weight, alpha=decay) if decay and self.adam_w_mode else update

    def _trust(self, group: dict[str, Any], weight: Tensor, update: Tensor) -> Tensor | float:
        """Norm of the weight over norm of its update, 1 where either is 0."""
        if not group["weight_decay"] and not self.use_nvlamb:
            return 1.0
        weight_norm, update_norm = weight.norm(), update.norm()
        usable = (weight_norm > 0) & (update_norm > 0)
        return torch.where(usable, weight_norm / update_norm, torch.ones_like(weight_norm))
