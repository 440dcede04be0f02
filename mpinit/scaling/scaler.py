"""A loss scaler: a fixed scale, or one that a :class:`DynamicLossScale` moves, and its counters on a device."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch

from ..basics.logs import log
from ..config.loss_scale import (
    LARGEST_COUNT,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    DynamicLossScale,
    LossScale,
    check_scale,
)


class LossScaler:
    """A loss scale and its counters.

    The state is a few 0-dimensional tensors on the loss's device. Updating them needs no device sync.

    Attributes:
        loss_id: the number of the loss, below ``num_losses``.
        skip_nonfinite: whether gradients are checked also where the scale does not move.
        has_scaled: whether a loss was scaled.
        found_inf: the result of gradient checks since the last update, a 0-dimensional tensor above 0 for inf or nan;
            None without a check.
    """

    def __init__(self, rule: LossScale, loss_id: int = 0, skip_nonfinite: bool = False) -> None:
        self._rule = rule
        self.loss_id = loss_id
        self.skip_nonfinite = skip_nonfinite
        first = rule.init if isinstance(rule, DynamicLossScale) else rule
        hysteresis = rule.hysteresis if isinstance(rule, DynamicLossScale) else 1
        # The scale; the number of good updates since it last changed; the number of overflows until it backs off, which
        # stays 0 until the scale grows. On the CPU, because the default device may be meta, whose tensors have no
        # value.
        self._state = (
            torch.tensor(first, dtype=torch.float32, device="cpu"),
            torch.zeros((), dtype=torch.int32, device="cpu"),
            torch.tensor(hysteresis, dtype=torch.int32, device="cpu"),
        )
        self._before_meta = self._state
        self.has_scaled = False
        self.found_inf: torch.Tensor | None = None

    @property
    def rule(self) -> LossScale:
        """The number that losses are multiplied by, or the rule that moves it. Setting it does not change the scale."""
        return self._rule

    @rule.setter
    def rule(self, rule: LossScale) -> None:
        self._rule = rule
        if isinstance(rule, DynamicLossScale):
            # torch grows the scale when the count equals the interval; a count above it would never be equal.
            self._state[1].clamp_(max=rule.growth_interval - 1)

    @property
    def is_dynamic(self) -> bool:
        """Return whether the scale moves."""
        return isinstance(self._rule, DynamicLossScale)

    @property
    def skips(self) -> bool:
        """Return whether gradients are checked, and a step is skipped for inf or nan among them."""
        return self.is_dynamic or self.skip_nonfinite

    @property
    def is_identity(self) -> bool:
        """Return whether the scale is always 1."""
        return self._rule == 1.0

    @property
    def device(self) -> torch.device:
        """The device of the state, which is that of the last scaled loss."""
        return self._state[0].device

    def to(self, device: torch.device) -> None:
        """Move the state to ``device``."""
        if self.device != device:
            # A tensor on the meta device has no value: keep the state from before.
            was_meta = self._state[0].is_meta
            self._before_meta = before = self._before_meta if was_meta else self._state
            self._state = (before[0].to(device), before[1].to(device), before[2].to(device))
            self.found_inf = None if self.found_inf is None or was_meta else self.found_inf.to(device)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` in float32, times the scale; differentiable.

        Returns:
            A float32 tensor of the same shape (float64 stays float64).
        """
        loss = loss if loss.dtype == torch.float64 else loss.float()
        if self.is_identity:
            return loss
        self.has_scaled = True
        self.to(loss.device)
        return loss * self._state[0]

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of the scale, and its reciprocal, 0-dimensional; later updates do not change them."""
        scale = self._state[0].clone()
        return scale, scale.reciprocal()

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale and the number of good updates, 0-dimensional; updates write to them."""
        return self._state[0], self._state[1]

    def loss_scale(self) -> float:
        """Return the scale as a float; this needs a device sync."""
        return float(self._state[0].item())

    def set_scale(self, scale: float) -> None:
        """Set the scale; the counters do not change."""
        check_scale(scale)
        self._state[0].fill_(scale)

    @property
    def unskipped(self) -> int:
        """The number of good updates since the scale last changed."""
        return int(self._state[1].item())

    @unskipped.setter
    def unskipped(self, count: int) -> None:
        rule = self._rule
        self._state[1].fill_(min(count, rule.growth_interval - 1) if isinstance(rule, DynamicLossScale) else count)

    def record_found_inf(self, found_inf: torch.Tensor) -> None:
        """Record the result of one check: a 0-dimensional float32 tensor, above 0 for inf or nan."""
        if self.is_dynamic:
            found_inf = found_inf.to(self.device)
            self.found_inf = found_inf if self.found_inf is None else torch.maximum(self.found_inf, found_inf)

    def update(self) -> None:
        """Update the scale by the checks since the last update; do nothing if there was no check."""
        found_inf, self.found_inf = self.found_inf, None
        rule, (scale, unskipped, tolerance) = self._rule, self._state
        if found_inf is None or not isinstance(rule, DynamicLossScale):
            return
        if rule.hysteresis > 1:
            overflow = found_inf > 0
            grows = ~overflow & (unskipped + 1 >= rule.growth_interval)
            tolerance.sub_(overflow.int()).clamp_(min=0)
            backs_off = overflow & (tolerance == 0)
            tolerance.masked_fill_(grows, rule.hysteresis)
            # A tolerated overflow resets the number of good steps, too. -1, because torch's update then adds 1.
            unskipped.masked_fill_(overflow & ~backs_off, -1)
            found_inf = backs_off.float()
        torch._amp_update_scale_(
            scale, unskipped, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
        )
        scale.clamp_(rule.lowest, rule.max)

    def counters(self) -> torch.Tensor:
        """Return the whole state as one float64 tensor on its device."""
        return torch.stack([number.double() for number in self._state])

    def load_counters(self, counters: torch.Tensor) -> None:
        """Set the state to the :meth:`counters` of a scaler with the same rule, on any device."""
        for number, loaded in zip(self._state, counters.unbind(), strict=True):
            number.copy_(loaded)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers.

        Returns:
            ``loss_scale`` and ``unskipped``; ``tolerance`` if hysteresis is above 1; ``scales``, which is False, if
            losses are not scaled.
        """
        state: dict[str, Any] = {"loss_scale": self.loss_scale(), "unskipped": self.unskipped}
        if self.is_identity:
            state["scales"] = False
        if isinstance(self._rule, DynamicLossScale) and self._rule.hysteresis > 1:
            state["tolerance"] = int(self._state[2].item())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Load a state of :meth:`state_dict`; if it is not valid, change nothing.

        A static scale does not change. A dynamic scale becomes the saved one, within its limits.

        Returns:
            True if the state was loaded. False if a dynamic scale was kept, because the saved run scaled no losses.
        """
        faults = check_state(state)
        if faults:
            raise ValueError(f"the state {'; it '.join(faults)}; nothing was loaded")
        if self.is_dynamic and not state.get("scales", True):
            return False
        rule, saved = self._rule, float(state["loss_scale"])
        hysteresis = rule.hysteresis if isinstance(rule, DynamicLossScale) else 1
        scale = min(max(saved, rule.lowest), rule.max) if isinstance(rule, DynamicLossScale) else rule
        if scale != saved:
            kind = "dynamic within its limits" if self.is_dynamic else "static"
            log.info("the saved loss scale %s is not used: here it is %s, and is %s now", saved, kind, scale)
        follows = self.is_dynamic and scale == saved
        self._state[0].fill_(check_scale(scale))
        self.unskipped = int(state["unskipped"]) if follows else 0
        self._state[2].fill_(min(int(state.get("tolerance", hysteresis)) if follows else hysteresis, hysteresis))
        self.found_inf = None
        return True


def check_state(state: Any) -> list[str]:
    """List the faults of a loss scaler's state; empty for a valid one."""
    if not isinstance(state, Mapping):
        return [f"is {state!r}, not a mapping with loss_scale and unskipped"]
    faults = [f"has no {key!r}" for key in ("loss_scale", "unskipped") if key not in state]
    if faults:
        return faults
    if not _is_scale(state["loss_scale"]):
        allowed = "a finite number above 0 whose reciprocal is a float32 number, too"
        faults.append(f"has loss_scale={state['loss_scale']!r}, not {allowed}")
    if not isinstance(state.get("scales", True), bool):
        faults.append(f"has scales={state['scales']!r}, not True or False")
    for key in ("unskipped", "tolerance"):
        if not _is_count(state.get(key, 0)):
            faults.append(f"has {key}={state[key]!r}, not a count between 0 and {LARGEST_COUNT}")
    return faults


def _is_scale(value: Any) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and bool(SMALLEST_SCALE <= value <= LARGEST_SCALE)


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) <= LARGEST_COUNT
