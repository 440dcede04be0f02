"""FusedSGD: torch's SGD under apex's name and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ._over_torch import as_list, can_fuse, keep_group_params_readable, step_without_hooks, with_missing_options


class FusedSGD(torch.optim.SGD):
    """SGD with momentum, in torch's fused kernel where the device has one.

    Args:
        params: parameters or groups.
        lr: the learning rate; required.
        momentum, dampening, weight_decay, nesterov: as in ``torch.optim.SGD``.
        wd_after_momentum: add the weight decay to the update after the momentum and not to the gradient before it.
        materialize_master_grads: accepted; how gradients reach the masters is amp's business.
        set_grad_none: what ``zero_grad()`` does when it is not told.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedSGD([weight], lr=0.1, momentum=0.9)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        entries = keep_group_params_readable(as_list(params))
        # The fused kernel skips an overflowed step inside, where the decay that goes before it cannot follow.
        fused = not wd_after_momentum and can_fuse(entries, torch.optim.SGD)
        super().__init__(
            entries,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            fused=fused or None,
        )
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; without an argument, as the constructor's ``set_grad_none`` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by this optimizer, by torch's, or by apex's FusedSGD."""
        super().load_state_dict(with_missing_options(state_dict, self.param_groups))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What the closure returned, or None.
        """
        inner = step_without_hooks(torch.optim.SGD)
        return decayed_step(self, inner, closure) if self.wd_after_momentum else inner(self, closure)


def decayed_step(optimizer: torch.optim.Optimizer, inner: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
    """One step of ``inner`` with its weight decay decoupled: ``p * (1 - lr * decay)``, then the rest of the update.

    Args:
        optimizer: whose groups hold "lr" and "weight_decay".
        inner: the optimizer's plain step.
        closure: re-evaluates the model and returns the loss.

    Returns:
        What the closure returned, or None.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    try:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            params = [p for p in group["params"] if p.grad is not None]
            if decay and params:
                with torch.no_grad():
                    torch._foreach_mul_(params, 1 - group["lr"] * decay)
            group["weight_decay"] = 0.0
        inner(optimizer)
    finally:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
    return loss
