"""FusedAdagrad: torch's Adagrad under apex's name and options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._over_torch import DecaysApart, as_groups, can_fuse


class FusedAdagrad(DecaysApart, torch.optim.Adagrad):
    """Adagrad, in torch's fused kernel where the device has one.

    Args:
        params: parameters or groups.
        lr: the learning rate.
        eps: added to the denominator.
        weight_decay: its strength.
        set_grad_none: what ``zero_grad()`` does when it is not told.
        adagrad_w_mode: decoupled weight decay rather than L2 regularisation.

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
        groups = as_groups(params)
        # The fused kernel skips an overflowed step inside, where the decay that goes before it cannot follow.
        fused = not adagrad_w_mode and can_fuse(groups, torch.optim.Adagrad)
        super().__init__(groups, lr=lr, eps=eps, weight_decay=weight_decay, fused=fused or None)
        self.adagrad_w_mode = self.decays_apart = adagrad_w_mode
        self.set_grad_none = set_grad_none
