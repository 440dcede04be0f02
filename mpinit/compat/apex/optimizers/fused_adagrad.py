"""FusedAdagrad: torch's Adagrad under apex's name and options."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from ._shared import OverTorch


class FusedAdagrad(OverTorch, torch.optim.Adagrad):
    """Adagrad with L2 regularisation, by torch's foreach operations.

    Args:
        params: parameters or groups.
        lr: the learning rate. Default 1e-2.
        eps: added to the denominator. Default 1e-10.
        weight_decay: the weight decay's coefficient. Default 0.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``. Default True.
        adagrad_w_mode: True, decoupled weight decay, is refused: torch's Adagrad has none. Default False.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedAdagrad([weight], lr=0.1)
    """

    steps_per_parameter: ClassVar[bool] = True  # for mpinit, which may step a few parameters at a time

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
            raise RuntimeError("FusedAdagrad does not support adagrad_w_mode=True: omit it, or use torch.optim.AdamW")
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay)
        self.set_grad_none = set_grad_none
