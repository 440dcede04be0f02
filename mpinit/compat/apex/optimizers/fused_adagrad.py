"""FusedAdagrad: Adagrad under apex's name and options."""

from collections.abc import Iterable
from typing import Any

import torch

from ._shared import ByForeach


class FusedAdagrad(ByForeach):
    """Adagrad by torch's foreach operations (Duchi, Hazan and Singer, 2011).

    The update is ``h += g * g; p -= lr * g / (sqrt(h) + eps)``, with the weight decay in the gradient, or, with
    ``adagrad_w_mode``, added to the update.

    Args:
        params: parameters or groups.
        lr: the learning rate. Default 1e-2.
        eps: added to the denominator. Default 1e-10.
        weight_decay: the weight decay's coefficient. Default 0.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``. Default True.
        adagrad_w_mode: True: decoupled weight decay; False: L2 regularisation. Default False.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedAdagrad([weight], lr=0.1)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = adagrad_w_mode
        self.set_grad_none = set_grad_none
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def update(self, groups: list[tuple[dict[str, Any], list[Any]]]) -> None:
        """Update the parameters of each group."""
        for group, params in groups:
            decay, grads = group["weight_decay"], [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    self.state[p]["sum"] = torch.zeros_like(p)
            sums = [self.state[p]["sum"] for p in params]
            if decay and not self.adagrad_w_mode:
                grads = list(torch._foreach_add(grads, params, alpha=decay))
            torch._foreach_addcmul_(sums, grads, grads)
            denominators = torch._foreach_sqrt(sums)
            torch._foreach_add_(denominators, group["eps"])
            updates = torch._foreach_div(grads, denominators)
            if decay and self.adagrad_w_mode:
                torch._foreach_add_(updates, params, alpha=decay)
            torch._foreach_add_(params, updates, alpha=-group["lr"])
