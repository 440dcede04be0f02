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
        overflowed = self._found_inf()
        self.core.update()
        self._overflowed = False
        return overflowed

    def _found_inf(self) -> bool:
        return self.core.found_inf is not None and bool(self.core.found_inf.item() > 0)

    def _rule(self) -> DynamicLossScale:
        # A fixed scale has apex's numbers too, which nothing uses.
        return self.core.rule if isinstance(self.core.rule, DynamicLossScale) else DynamicLossScale()

    def _set_rule(self, rule: DynamicLossScale | float) -> None:
        if self.core.is_dynamic == isinstance(rule, DynamicLossScale):
            self.core.rule = rule

    def _set_scale(self, value: Any) -> None:
        self.core.set_scale(float(value))
        self._set_rule(float(value))  # a fixed rule of 1 never scales

    dynamic = property(lambda self: self.core.is_dynamic)
    _loss_scale = property(loss_scale, _set_scale)
    _unskipped = property(lambda self: self.core.unskipped, lambda self, n: setattr(self.core, "unskipped", int(n)))
    _has_overflow = property(
        lambda self: self._overflowed or self._found_inf(),
        lambda self, value: setattr(self, "_overflowed", bool(value)),
    )
    _scale_seq_len = property(
        lambda self: self._rule().growth_interval,
        lambda self, n: self._set_rule(dataclasses.replace(self._rule(), growth_interval=int(n))),
    )
    _min_loss_scale = property(
        lambda self: self._rule().min,
        lambda self, low: self._set_rule(
            self._rule().limited(None if low is None else float(low), self._rule().max),
        ),
    )
    _max_loss_scale = property(
        lambda self: self._rule().max,
        lambda self, high: self._set_rule(self._rule().limited(self._rule().min, float(high))),
    )
