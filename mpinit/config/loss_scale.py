"""The public value that says how a dynamic loss scale moves."""

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

# A scale and its reciprocal are float32 numbers. Outside these limits one of them is 0 or inf.
SMALLEST_SCALE: Final = 2.0**-126
LARGEST_SCALE: Final = 2.0**126
# Counters on the device are int32.
LARGEST_COUNT: Final = 2**31 - 1
# Skipped steps in a row after which step() raises, where the scale does not move.
MOST_SKIPS: Final = 64


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows while gradients are finite and backs off after an overflow.

    Pass it to :func:`initialize` as ``loss_scale``. "dynamic" is ``DynamicLossScale()``. After each backward pass whose
    gradients were checked the scale moves as in Micikevicius et al., "Mixed Precision Training" (2018)::

        scale, good, tolerance = init, 0, hysteresis            # at the beginning

        if some gradient is inf or nan:                         # and the step is skipped
            good, tolerance = 0, max(tolerance - 1, 0)
            if tolerance == 0:
                scale *= backoff_factor
        else:
            good += 1
            if good == growth_interval:
                scale, good, tolerance = scale * growth_factor, 0, hysteresis
        scale = clamp(scale, min, max)

    Args:
        init: the first scale. Default 2**16.
        growth_factor: above 1. Default 2.
        backoff_factor: between 0 and 1. Default 0.5.
        growth_interval: number of good backward passes in a row before the scale grows. Default 2,000.
        hysteresis: the scale backs off at this many overflows. Default 1.
        min, max: limits of the scale. Default None (no limit) and 2**24.
        max_consecutive_skips: ``step()`` raises after this many skipped steps in a row. Default 64.

    Raises:
        ValueError: a number is out of its range, or ``init`` is not between ``min`` and ``max``.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> rule = mpinit.DynamicLossScale(init=2.0**10, growth_interval=100)
        >>> model, optimizer = mpinit.initialize(model, optimizer, "O2", loss_scale=rule)
        >>> mpinit.loss_scale(optimizer)
        1024.0
        >>> mpinit.undo(model)
    """

    init: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min: float | None = None
    max: float = 2.0**24
    max_consecutive_skips: int = MOST_SKIPS

    def __post_init__(self) -> None:
        for name in ("init", "max", "min")[: 2 if self.min is None else 3]:
            check_scale(getattr(self, name), name)
        for name in ("growth_interval", "hysteresis", "max_consecutive_skips"):
            value = getattr(self, name)
            if not _is_number(value, Integral) or not 1 <= value <= LARGEST_COUNT:
                raise ValueError(f"{name}={value!r} is not a whole number between 1 and {LARGEST_COUNT}")
        if not _is_number(self.growth_factor) or not 1.0 < self.growth_factor < math.inf:
            raise ValueError(f"growth_factor={self.growth_factor!r} is not a finite number above 1")
        if not _is_number(self.backoff_factor) or not 0.0 < self.backoff_factor < 1.0:
            raise ValueError(f"backoff_factor={self.backoff_factor!r} is not a number between 0 and 1")
        if self.lowest > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}")
        if not self.lowest <= self.init <= self.max:
            raise ValueError(f"init={self.init} is not between min={self.min} and max={self.max}")

    @property
    def lowest(self) -> float:
        """The lower limit as a number: 2**-126 where ``min`` is None."""
        return SMALLEST_SCALE if self.min is None else self.min


# Names of the rule's numbers, here and elsewhere (torch.amp.GradScaler) -> the rule's own.
RULE_NAMES: Final = {field.name: field.name for field in dataclasses.fields(DynamicLossScale)}
RULE_NAMES.update(dict.fromkeys(("init_scale", "init_loss_scale"), "init"))

LossScale = float | DynamicLossScale


def check_scale(scale: Any, name: str = "loss_scale") -> float:
    """Return ``scale``, or raise a ValueError where scaling by it could not be undone in float32."""
    if not _is_number(scale) or not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ValueError(f"{name}={scale!r} is not a number between 2**-126 and 2**126, such as 128.0")
    return float(scale)


def _is_number(value: Any, kind: type = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
