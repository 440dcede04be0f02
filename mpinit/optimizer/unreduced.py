"""Gradients that FSDP2 has not reduced yet, because a backward pass was to skip that: they are in no ``weight.grad``.

``set_requires_gradient_sync(False)`` keeps whole gradients, ``set_requires_all_reduce(False)`` sums over a part of the
ranks. FSDP adds those of the next pass, and reduces the sum. So all of them carry one scale while a pass runs, and
none between two passes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..basics.modules import modules_of
from ..distributed.sharding import groups_of_fsdp, unreduced_gradients
from ..scaling.scaler import LossScaler, UsedScale
from .gradient_state import OTHER_SCALER
from .gradients import unscale_, unscale_and_check_


class UnreducedGradients:
    """The gradients of a session's models that FSDP2 has not reduced yet.

    Attributes:
        scaler: the loss scaler that they are scaled by at the moment; None between passes.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.scaler: LossScaler | None = None
        self._used: UsedScale | None = None
        self._groups: list[Any] = groups_of_fsdp([module for model in models for module in modules_of(model)])

    def present(self) -> list[torch.Tensor]:
        """Return the gradients, of which each is this process's own tensor."""
        return unreduced_gradients(self._groups)

    @torch.no_grad()
    def scale(self, scaler: LossScaler) -> None:
        """Multiply them by a scale, so that FSDP can add those of a loss that is scaled by it.

        Raises:
            RuntimeError: they are scaled by another loss's scale, which a GradScaler has not unscaled.
        """
        if not self._groups or scaler.is_identity:
            return
        used = scaler.used_scale()
        if self.scaler is scaler and self._used is used:
            return
        if self.scaler is not None and self.scaler is not scaler:
            raise RuntimeError(OTHER_SCALER.format("FSDP, which are not reduced yet,"))
        present = self.present()
        if present:
            factor = scaler.scale_now()
            unscale_(present, factor if self._used is None else factor / scaler.scale_now(self._used))
        self.scaler, self._used = scaler, used

    @torch.no_grad()
    def unscale(self, scaler: LossScaler) -> torch.Tensor | None:
        """Unscale them after a backward pass, and check them where steps are skipped.

        Returns:
            Whether they overflowed, 0-dimensional; None without gradients or a check.
        """
        if self.scaler is not scaler:
            return None
        used, self.scaler, self._used = self._used, None, None
        present = self.present()
        if not present:
            return None
        inverse = scaler.inverse_scale(used)
        if not scaler.skips:
            unscale_(present, inverse)
            return None
        return unscale_and_check_(present, inverse)
