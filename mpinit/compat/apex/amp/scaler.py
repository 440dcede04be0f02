"""LossScaler under apex's names, over mpinit's."""

from typing import Any

import torch

from ... import _core


def _number_of_rule(name: str, kind: type) -> Any:
    """Make a property that reads and writes a field of the scaler's rule."""
    return property(
        lambda self: getattr(self.core.rule, name),
        lambda self, value: _core.change_rule(self.core, **{name: kind(value)}),
    )


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

    _scale_seq_len = _number_of_rule("growth_interval", int)
    _max_loss_scale = _number_of_rule("max_scale", float)

    @property
    def dynamic(self) -> bool:
        """Return whether the scale is dynamic."""
        return self.core.rule.dynamic

    @property
    def _min_loss_scale(self) -> float | None:
        low = self.core.rule.min_scale
        return None if low == _core.LOWEST_SCALE else low

    @_min_loss_scale.setter
    def _min_loss_scale(self, value: float | None) -> None:
        _core.change_rule(self.core, min_scale=_core.LOWEST_SCALE if value is None else float(value))

    @property
    def _loss_scale(self) -> float:
        return self.core.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: Any) -> None:
        self.core.set_scale(float(value))
        if not self.dynamic:
            # A static rule with an init_scale of 1 never scales.
            _core.change_rule(self.core, init_scale=float(value))

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
