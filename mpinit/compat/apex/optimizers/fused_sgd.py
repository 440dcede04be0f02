"""FusedSGD: torch's SGD under apex's name and options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._over_torch import DecaysApart, as_groups, can_fuse


class FusedSGD(DecaysApart, torch.optim.SGD):
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
        groups = as_groups(params)
        # The fused kernel skips an overflowed step inside, where the decay that goes before it cannot follow; and on a
        # CPU it does not update 16-bit parameters rightly, which these may become.
        fused = not wd_after_momentum and can_fuse(groups, torch.optim.SGD, but_not_on="cpu")
        super().__init__(
            groups,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            fused=fused or None,
        )
        self.wd_after_momentum = self.decays_apart = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
