"""FusedAdam: torch's Adam and AdamW under apex's name and options."""

from collections.abc import Iterable
from typing import Any

import torch

from ._shared import OverTorch, as_groups, can_fuse

# So many steps that beta**steps is 0 in float32 for any beta that an optimizer is given: the correction is then 1.
_LONG_PAST_WARMUP = 1e9


class FusedAdam(OverTorch, torch.optim.Adam):
    """Adam (``adam_w_mode=False``) or AdamW (the default), in torch's fused kernel where the device has one.

    Args:
        params: parameters or groups.
        lr: the learning rate.
        bias_correction: whether the running averages are corrected for their zero start.
        betas: decay of the two running averages.
        eps: added to the denominator.
        adam_w_mode: decoupled weight decay (AdamW) rather than L2 regularisation.
        weight_decay: its strength.
        amsgrad: refused, as apex does.
        set_grad_none: what ``zero_grad()`` does when it is not told.
        capturable: as in torch.
        master_weights: accepted; float32 masters are kept by ``amp.initialize(opt_level="O2")``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedAdam([weight], lr=0.1)
    """

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
            fused=can_fuse(groups, torch.optim.Adam) or None,
            decoupled_weight_decay=adam_w_mode,
        )
        self.defaults["bias_correction"] = bias_correction
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        found = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        steps: list[torch.Tensor] = lists[-1]
        if steps and not group.get("bias_correction", True):
            # The update knows no such option: it gets step counts at which the correction is 1, and the real
            # counts go on beside them.
            torch._foreach_add_(steps, 1)
            steps[:] = [torch.full_like(step, _LONG_PAST_WARMUP) for step in steps]
        return found
