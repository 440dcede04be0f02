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
        self._overflowed = False

    @property
    def dynamic(self) -> bool:
        """Return whether the scale is dynamic."""
        return self.core.is_dynamic

    @property
    def _rule(self) -> DynamicLossScale:
        # A fixed scale has apex's numbers too, which nothing uses.
        return self.core.rule if isinstance(self.core.rule, DynamicLossScale) else DynamicLossScale()

    @_rule.setter
    def _rule(self, rule: DynamicLossScale) -> None:
        if self.dynamic:
            _core.set_rule(self.core, rule)

    @property
    def _scale_seq_len(self) -> int:
        return self._rule.growth_interval

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: int) -> None:
        self._rule = dataclasses.replace(self._rule, growth_interval=int(value))

    @property
    def _min_loss_scale(self) -> float | None:
        return self._rule.min

    @_min_loss_scale.setter
    def _min_loss_scale(self, value: float | None) -> None:
        self._rule = self._rule.limited(None if value is None else float(value), self._rule.max)

    @property
    def _max_loss_scale(self) -> float:
        return self._rule.max

    @_max_loss_scale.setter
    def _max_loss_scale(self, value: float) -> None:
        self._rule = self._rule.limited(self._rule.min, float(value))

    @property
    def _loss_scale(self) -> float:
        return self.core.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: Any) -> None:
        self.core.set_scale(float(value))
        if not self.dynamic:
            _core.set_rule(self.core, float(value))  # a rule of 1 never scales

    @property
    def _unskipped(self) -> int:
        return self.core.unskipped

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.core.unskipped = int(value)

    @property
    def _has_overflow(self) -> bool:
        return self._overflowed or _core.has_overflow(self.core)

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._overflowed = bool(value)

    def loss_scale(self) -> float:
        """Return the present loss scale."""
        return self.core.loss_scale()

    def clear_overflow_state(self) -> None:
        """Clear the overflow flag."""
        self._overflowed = False

    def update_scale(self) -> bool:
        """Update a dynamic scale by the overflows found since the last update.

        Returns:
            True if an overflow was found and the step must be skipped.
        """
        self.core.record_found_inf(torch.tensor(float(self._overflowed), dtype=torch.float32, device="cpu"))
        # Read before the update: at its lower limit the scale does not go down.
        overflowed = _core.has_overflow(self.core)
        self.core.update()
        self._overflowed = False
        return overflowed
