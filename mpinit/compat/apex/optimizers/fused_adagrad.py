"""FusedAdagrad: torch's Adagrad under apex's name and options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._shared import OverTorch, as_groups, can_fuse


class FusedAdagrad(OverTorch, torch.optim.Adagrad):
    """Adagrad, in torch's fused kernel where the device has one.

    Args:
        params: parameters or groups.
        lr: the learning rate.
        eps: added to the denominator.
        weight_decay: its strength.
        set_grad_none: what ``zero_grad()`` does when it is not told.
        adagrad_w_mode: refused; torch's weight decay is L2 regularisation.

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
        if adagrad_w_mode:
            raise RuntimeError(
                "FusedAdagrad does not support adagrad_w_mode=True: leave it out, so that the weight decay is added to "
                "the gradient, or install NVIDIA apex for it"
            )
        groups = as_groups(params)
        fused = can_fuse(groups, torch.optim.Adagrad)
        super().__init__(groups, lr=lr, eps=eps, weight_decay=weight_decay, fused=fused or None)
        self.set_grad_none = set_grad_none
