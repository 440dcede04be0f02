"""FusedLAMB: LAMB with a global clip of gradients, for BERT pre-training, under apex's name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ._shared import ApexOptimizer


class FusedLAMB(ApexOptimizer):
    """LAMB by torch's foreach operations. All parameters are on one device, as in apex.

    The update is that of You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2019),
    algorithm 2, with apex's options::

        g = g / max(1, norm(all gradients) / max_grad_norm)       # unless max_grad_norm is 0 or None
        g = g + weight_decay * p                                  # adam_w_mode=False
        m = beta1 * m + beta3 * g                                 # beta3 is 1 - beta1, or 1 without grad_averaging
        v = beta2 * v + (1 - beta2) * g * g
        u = (m / c1) / (sqrt(v / c2) + eps)                       # c = 1 - beta ** step, or 1 without bias_correction
        u = u + weight_decay * p                                  # adam_w_mode=True
        ratio = norm(p) / norm(u)                                 # 1 where a norm is 0; also without weight decay,
        p = p - lr * ratio * u                                    # unless use_nvlamb

    Args:
        params: parameters or groups.
        lr: the learning rate. Default 1e-3.
        bias_correction: whether the moments are corrected for their zero start. Default True.
        betas: decay rates of the two moments. Default (0.9, 0.999).
        eps: added to the denominator. Default 1e-6.
        weight_decay: the weight decay's coefficient. Default 0.01.
        amsgrad: refused, as in apex.
        adam_w_mode: True: decoupled weight decay; False: L2 regularisation. Default True.
        grad_averaging: whether the new gradient is multiplied by ``1 - beta1``. Default True.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``. Default True.
        max_grad_norm: the limit of the norm of all gradients of all groups. Default 1.0.
        use_nvlamb: whether parameters without weight decay have a trust ratio, too. Default False.

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
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support the AMSGrad variant: omit amsgrad=True")
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and return the closure's loss, or None.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        present = [p.grad for _, params in groups for p in params]
        if not present:
            return loss
        if any(grad.is_sparse for grad in present):
            raise RuntimeError("FusedLAMB takes no sparse gradients: use torch.optim.SparseAdam for them")
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(present, 2, torch.float32)))
        for group, params in groups:
            if not params:
                continue
            # Counted for each group, as in apex, whose checkpoints have the number there.
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            decay, limit = group["weight_decay"], group["max_grad_norm"]
            for p in params:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            moments = [self.state[p]["exp_avg"] for p in params]
            squares = [self.state[p]["exp_avg_sq"] for p in params]
            shrink = torch.clamp(norm / limit, min=1.0) if limit else torch.ones_like(norm)
            grads = torch._foreach_div([p.grad for p in params], shrink)
            if decay and not self.adam_w_mode:
                torch._foreach_add_(grads, params, alpha=decay)
            torch._foreach_mul_(moments, beta1)
            torch._foreach_add_(moments, grads, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
            corrects, count = group["bias_correction"], group["step"]
            denominators = torch._foreach_div(squares, 1 - beta2**count if corrects else 1.0)
            torch._foreach_sqrt_(denominators)
            torch._foreach_add_(denominators, group["eps"])
            updates = torch._foreach_div(moments, 1 - beta1**count if corrects else 1.0)
            torch._foreach_div_(updates, denominators)
            if decay and self.adam_w_mode:
                torch._foreach_add_(updates, params, alpha=decay)
            if decay or self.use_nvlamb:
                for p, update in zip(params, updates, strict=True):
                    weight_norm, update_norm = torch.linalg.vector_norm(p), torch.linalg.vector_norm(update)
                    has_ratio = (weight_norm != 0) & (update_norm != 0)
                    update.mul_(torch.where(has_ratio, weight_norm / update_norm, torch.ones_like(weight_norm)))
            torch._foreach_add_(params, updates, alpha=-group["lr"])
        return loss
