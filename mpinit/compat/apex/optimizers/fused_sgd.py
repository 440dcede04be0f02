"""FusedSGD: torch's SGD under apex's name and options."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from ._shared import OverTorch, are_on, as_groups


class FusedSGD(OverTorch, torch.optim.SGD):
    """SGD with momentum, in torch's fused kernel where the device has one.

    Args:
        params: parameters or groups.
        lr: the learning rate; required.
        momentum, dampening, weight_decay, nesterov: as in ``torch.optim.SGD``.
        wd_after_momentum: True is refused: torch adds the weight decay to the gradient, before the momentum.
        materialize_master_grads: accepted and ignored.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``. Default False.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedSGD([weight], lr=0.1, momentum=0.9)
    """

    steps_per_parameter: ClassVar[bool] = True  # for mpinit, which may step a few parameters at a time

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
        if wd_after_momentum:
            raise RuntimeError(
                "FusedSGD does not support wd_after_momentum=True: omit it, so that the weight decay is added to "
                "the gradient, or install NVIDIA apex for it"
            )
        groups = as_groups(params)
        super().__init__(
            groups,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            # Not on a CPU: there the fused kernel updates 16-bit parameters wrongly, and initialize() may cast these.
            fused=are_on(groups, "cuda", "xpu", "mps") or None,
        )
        self.set_grad_none = set_grad_none
