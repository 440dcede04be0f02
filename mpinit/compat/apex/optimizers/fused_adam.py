"""FusedAdam: torch's Adam and AdamW under apex's name and options."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from ._shared import OverTorch, are_on, as_groups

# After this many steps beta**steps is 0 in float32 for any beta below 1, so the bias correction is 1.
_LONG_PAST_WARMUP = 1e9


class FusedAdam(OverTorch, torch.optim.Adam):
    """Adam (``adam_w_mode=False``) or AdamW (the default), in torch's fused kernel where the device has one.

    Args:
        params: parameters or groups.
        lr: the learning rate. Default 1e-3.
        bias_correction: whether the running averages are corrected for their zero start. Default True.
        betas: decay rates of the two running averages. Default (0.9, 0.999).
        eps: added to the denominator. Default 1e-8.
        adam_w_mode: True: decoupled weight decay (AdamW); False: L2 regularisation (Adam). Default True.
        weight_decay: the weight decay's coefficient. Default 0.
        amsgrad: refused, as in apex.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``. Default True.
        capturable: as in ``torch.optim.Adam``. Default False.
        master_weights: accepted and ignored; ``amp.initialize(opt_level="O2")`` makes float32 masters.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedAdam([weight], lr=0.1)
    """

    steps_per_parameter: ClassVar[bool] = True  # for mpinit, which may step a few parameters at a time

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support amsgrad=True; use torch.optim.AdamW(amsgrad=True)")
        groups = as_groups(params)
        super().__init__(
            [{"bias_correction": bias_correction, **group} for group in groups],
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            capturable=capturable,
            fused=are_on(groups, "cuda", "xpu", "mps", "cpu") or None,
            decoupled_weight_decay=adam_w_mode,
        )
        self.defaults["bias_correction"] = bias_correction
        self.set_grad_none = set_grad_none

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        found = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        steps: list[torch.Tensor] = lists[-1]
        if steps and not group.get("bias_correction", True):
            # torch's update has no such option. It is passed step counts at which the correction is 1; the real counts
            # are incremented here.
            torch._foreach_add_(steps, 1)
            steps[:] = [torch.full_like(step, _LONG_PAST_WARMUP) for step in steps]
        return found
