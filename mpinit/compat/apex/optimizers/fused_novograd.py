"""FusedNovoGrad: NovoGrad under apex's name and options."""

from collections.abc import Iterable
from typing import Any

import torch

from ._shared import ByForeach, bias_corrections


class FusedNovoGrad(ByForeach):
    """NovoGrad by torch's foreach operations.

    The update is that of Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of
    Deep Networks" (2019), algorithm 1, with apex's options. Its second moment is one number for each parameter::

        v = sqrt(beta2 * v * v + (1 - beta2) * norm(g) ** 2)      # norm_type=0: beta2 * v + (1 - beta2) * max(abs(g))
        d = v / sqrt(1 - beta2 ** step) + eps                     # without the root if bias_correction is False
        m = beta1 * m + beta3 * g                                 # beta3 is 1 - beta1, or 1 without grad_averaging
        p = p - lr * (m / (1 - beta1 ** step) / d + weight_decay * p)

    In the first step v is the norm itself, unless ``init_zero`` is True. With ``reg_inside_moment`` the moment is of
    ``g / d + weight_decay * p``, and the update is ``lr * m / (1 - beta1 ** step)``.

    Args:
        params, lr, bias_correction, betas, weight_decay, amsgrad, grad_averaging, set_grad_none: as in FusedLAMB. The
            default of weight_decay is 0.
        eps: added to the denominator. Default 1e-8.
        reg_inside_moment: whether norm and weight decay are inside of the first moment. Default False.
        norm_type: 2, or 0 for the largest magnitude. Default 2.
        init_zero: whether the second moment begins at 0. Default False.

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
            raise RuntimeError("FusedNovoGrad does not support the AMSGrad variant: omit amsgrad=True")
        if norm_type not in (0, 2):
            raise RuntimeError(f"norm_type={norm_type!r}: FusedNovoGrad supports 2, and 0 for the largest magnitude")
        self.moment_mode = 0 if reg_inside_moment else 1
        self.set_grad_none = set_grad_none
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "grad_averaging": grad_averaging}
        defaults |= {"norm_type": norm_type, "init_zero": init_zero}
        super().__init__(params, defaults)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Raises:
            ValueError: NVIDIA's apex wrote it: its norms are in the group, in an order that the state does not tell.
        """
        if any("exp_avg_sq" in group for group in state_dict["param_groups"]):
            raise ValueError(
                "this state of FusedNovoGrad is of NVIDIA's apex, whose norms belong to no parameter by name: load the "
                "model alone, and begin with a new optimizer"
            )
        super().load_state_dict(state_dict)

    def update(self, groups: list[tuple[dict[str, Any], list[Any]]]) -> None:
        """Update the parameters of each group."""
        for group, params in groups:
            beta1, beta2 = group["betas"]
            decay, is_max = group["weight_decay"], group["norm_type"] == 0
            grads = [p.grad for p in params]
            norms = torch._foreach_norm(grads, float("inf") if is_max else 2, dtype=torch.float32)
            for p, norm in zip(params, norms, strict=True):
                if not self.state[p]:
                    first = torch.zeros_like(norm) if group["init_zero"] else norm.clone()
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=first)
            moments = [self.state[p]["exp_avg"] for p in params]
            seconds = [self.state[p]["exp_avg_sq"] for p in params]
            if is_max:
                torch._foreach_mul_(seconds, beta2)
                torch._foreach_add_(seconds, norms, alpha=1 - beta2)
            else:
                torch._foreach_mul_(seconds, seconds)
                torch._foreach_mul_(seconds, beta2)
                torch._foreach_addcmul_(seconds, norms, norms, 1 - beta2)
                torch._foreach_sqrt_(seconds)
            first_correction, second_correction = bias_corrections(group)
            denominators = torch._foreach_div(seconds, second_correction**0.5)
            torch._foreach_add_(denominators, group["eps"])
            if self.moment_mode == 0:
                grads = list(torch._foreach_div(grads, denominators))
                if decay:
                    torch._foreach_add_(grads, params, alpha=decay)
            torch._foreach_mul_(moments, beta1)
            torch._foreach_add_(moments, grads, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
            updates = torch._foreach_div(moments, first_correction)
            if self.moment_mode == 1:
                torch._foreach_div_(updates, denominators)
                if decay:
                    torch._foreach_add_(updates, params, alpha=decay)
            torch._foreach_add_(params, updates, alpha=-group["lr"])
