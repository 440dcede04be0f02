"""LossScaler under apex's names, over mpinit's."""

import dataclasses
from typing import Any

import torch

from ....amp import DynamicLossScale
from ... import _core


class LossScaler:
    """A view of one loss scaler, as in ``amp._amp_state.loss_scalers``; scripts read and write private attributes."""

    def __init__(self, core: _core.Scaler) -> None:
        if not isinstance(core, _core.Scaler):
            raise TypeError(
                f"LossScaler({core!r}): amp.initialize makes amp's loss scalers; for a loop by hand use "
                "torch.amp.GradScaler"
            )
        self.core = core

    def loss_scale(self) -> float:
        """Return the present loss scale."""
        return self.core.loss_scale()

    def clear_overflow_state(self) -> None:
        """Clear the overflow flag."""
        self._has_overflow = False

    def update_scale(self) -> bool:
        """Update a dynamic scale by the overflows found since the last update.

        Returns:
            True if an overflow was found and the step must be skipped.
        """
        self.core.record_found_inf(_flag(False))  # without a check the step counts as good, as in apex
        # Read before the update: at its lower limit the scale does not go down.
        overflowed = self._has_overflow
        self.core.update()
        return overflowed

    @property
    def _has_overflow(self) -> bool:
        return self.core.found_inf is not None and bool(self.core.found_inf.item() > 0)

    @_has_overflow.setter
    def _has_overflow(self, value: Any) -> None:
        self.core.found_inf = None
        self.core.record_found_inf(_flag(bool(value)))

    @property
    def _loss_scale(self) -> float:
        return self.core.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: Any) -> None:
        self.core.set_scale(float(value))
        if not self.dynamic:
            self.core.rule = float(value)  # a fixed rule of 1 never scales

    @property
    def _scale_seq_len(self) -> int:
        return self.core.rule.growth_interval if isinstance(self.core.rule, DynamicLossScale) else 2000

    @_scale_seq_len.setter
    def _scale_seq_len(self, interval: int) -> None:
        if isinstance(self.core.rule, DynamicLossScale):
            self.core.rule = dataclasses.replace(self.core.rule, growth_interval=int(interval))

    dynamic = property(lambda self: self.core.is_dynamic)
    _unskipped = property(lambda self: self.core.unskipped, lambda self, n: setattr(self.core, "unskipped", int(n)))


def _flag(value: bool) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float32, device="cpu")
