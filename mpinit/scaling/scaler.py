"""A loss scaler: a scale that moves by a frozen rule, and its counters, on the device of the loss.

A rule is no scaling, a static scale or a dynamic one, which is that of Micikevicius et al., "Mixed Precision Training"
(2018), section 3.2, with the hysteresis of Megatron-LM.
"""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch

from ..basics.logs import log
from ..plan import ScalingRule
from ..settings.spellings import LARGEST_COUNT, LARGEST_SCALE, SMALLEST_SCALE, check_scale


class LossScaler:
    """A loss scale and its counters.

    The state is a few 0-dimensional tensors on the loss's device: updating them never waits for the device, and
    they are read only when they are asked for.

    Attributes:
        loss_id: of the losses that it scales.
        passes: how often something was scaled.
        loads: how often a state was loaded.
        noted: what the checks of gradients found since the last update, 0-dimensional; None where none was made.
    """

    def __init__(self, rule: ScalingRule, loss_id: int = 0) -> None:
        self._rule = rule
        self.loss_id = loss_id
        # On the CPU whatever the default device is: from the meta device no value would ever come back. The scale,
        # good updates since it last moved, and overflows left until it backs off; 0 once exhausted, until it grows.
        self._state = (
            torch.tensor(rule.init_scale, dtype=torch.float32, device="cpu"),
            torch.zeros((), dtype=torch.int32, device="cpu"),
            torch.tensor(rule.hysteresis, dtype=torch.int32, device="cpu"),
        )
        self._before_meta = self._state
        self.noted: torch.Tensor | None = None
        self.passes = self.loads = 0

    @property
    def rule(self) -> ScalingRule:
        """The numbers by which the scale moves; another set may be put in, and the scale stays where it is."""
        return self._rule

    @rule.setter
    def rule(self, rule: ScalingRule) -> None:
        self._rule = rule
        # torch grows the scale when the count is equal to the interval: past it, never.
        self._state[1].clamp_(max=rule.growth_interval - 1)

    @property
    def is_identity(self) -> bool:
        """Whether scaling by this scaler changes nothing, now and ever."""
        return not self._rule.dynamic and self._rule.init_scale == 1.0

    @property
    def device(self) -> torch.device:
        """Where the state is: the device of the last loss scaled."""
        return self._state[0].device

    def to(self, device: torch.device) -> None:
        """Move the state to ``device``; nothing happens where it is there already."""
        if self.device != device:
            # On the meta device there are no numbers: what was before a loss there counts on.
            was_meta = self._state[0].is_meta
            self._before_meta = before = self._before_meta if was_meta else self._state
            self._state = (before[0].to(device), before[1].to(device), before[2].to(device))
            self.noted = None if self.noted is None or was_meta else self.noted.to(device)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` in float32, times the scale; differentiable.

        Returns:
            A float32 tensor of the same shape (float64 stays float64).
        """
        self.passes += 1
        loss = loss if loss.dtype == torch.float64 else loss.float()
        if self.is_identity:
            return loss
        self.to(loss.device)
        return loss * self._state[0]

    def inverse_scale(self) -> torch.Tensor:
        """The reciprocal of the scale: 0-dimensional, float32, on the scaler's device; rounded once."""
        return self._state[0].double().reciprocal().float()

    def scale_now(self) -> torch.Tensor:
        """The scale in force, 0-dimensional, in memory of its own: read later it is still what it was."""
        return self._state[0].clone()

    def loss_scale(self) -> float:
        return float(self._state[0].item())

    def set_scale(self, scale: float) -> None:
        """Put the scale to ``scale``; the growth counter is kept."""
        self._state[0].fill_(check_scale(scale))

    def take_scale(self, scale: torch.Tensor) -> None:
        """Go on with the scale of other ranks, 0-dimensional, without a wait for its device."""
        self._state[0].copy_(scale)

    @property
    def unskipped(self) -> int:
        """Good updates since the scale last moved."""
        return int(self._state[1].item())

    @unskipped.setter
    def unskipped(self, count: int) -> None:
        self._state[1].fill_(min(count, self._rule.growth_interval - 1))

    @property
    def noted_overflow(self) -> bool:
        """Whether one of the checks since the last update found inf or nan. Waits for the device."""
        return self.noted is not None and bool(self.noted.item() > 0)

    def note(self, found_inf: torch.Tensor) -> None:
        """Take down the outcome of one check: a 0-dimensional float32 tensor, above 0 where it found inf or nan."""
        if self._rule.dynamic:
            found_inf = found_inf.to(self.device)
            self.noted = found_inf.clone() if self.noted is None else torch.maximum(self.noted, found_inf)

    def update(self) -> None:
        """Move the scale by what was noted since the last update; without notes nothing happens."""
        found_inf, self.noted = self.noted, None
        if found_inf is None:
            return
        rule, (scale, unskipped, tolerance) = self._rule, self._state
        if rule.hysteresis > 1:
            overflow = found_inf > 0
            grows = ~overflow & (unskipped + 1 >= rule.growth_interval)
            tolerance.sub_(overflow.int()).clamp_(min=0)
            backs_off = overflow & (tolerance == 0)
            tolerance.masked_fill_(grows, rule.hysteresis)
            # A tolerated overflow still ends the run of good steps; -1 because the update counts it as a good one.
            unskipped.masked_fill_(overflow & ~backs_off, -1)
            found_inf = backs_off.float()
        torch._amp_update_scale_(
            scale, unskipped, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
        )
        scale.clamp_(rule.min_scale, rule.max_scale)

    def counters(self) -> torch.Tensor:
        """All of the state, in one tensor of float64 on its device."""
        return torch.stack([number.double() for number in self._state])

    def take_counters(self, counters: torch.Tensor) -> None:
        """Go on from the :meth:`counters` of a scaler with the same rule, on any device."""
        for number, taken in zip(self._state, counters.unbind(), strict=True):
            number.copy_(taken)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers.

        Returns:
            ``loss_scale`` and ``unskipped``, ``tolerance`` where hysteresis counts, and ``scales``, False, where losses
            are not scaled at all.
        """
        state: dict[str, Any] = {"loss_scale": self.loss_scale(), "unskipped": self.unskipped}
        if self.is_identity:
            state["scales"] = False
        if self._rule.hysteresis > 1:
            state["tolerance"] = int(self._state[2].item())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over a state of :meth:`state_dict`, all of it or nothing.

        A scale that does not move stays what the user asked for, whatever was saved; a dynamic one goes on from the
        saved one, within its limits.

        Returns:
            Whether it is a start for this scaler: a scale of 1 that was no scaling is none for one that moves, which
            stays where it is.
        """
        faults = check_state(state)
        if faults:
            raise ValueError(f"the state {'; it '.join(faults)}; nothing was loaded")
        if self._rule.dynamic and not state.get("scales", True):
            return False
        rule, saved = self._rule, float(state["loss_scale"])
        scale = min(max(saved, rule.min_scale), rule.max_scale) if rule.dynamic else rule.init_scale
        if scale != saved:
            kind = "dynamic within its limits" if rule.dynamic else "static"
            log.info("the saved loss scale %s is not taken over: here it is %s, and is %s now", saved, kind, scale)
        follows = rule.dynamic and scale == saved
        self.set_scale(scale)
        self.unskipped = int(state["unskipped"]) if follows else 0
        tolerance = int(state.get("tolerance", rule.hysteresis)) if follows else rule.hysteresis
        self._state[2].fill_(min(tolerance, rule.hysteresis))
        self.noted = None
        self.loads += 1
        return True


def check_state(state: Any) -> list[str]:
    """What keeps ``state`` from being a loss scaler's state, a line each; empty where nothing does."""
    if not isinstance(state, Mapping):
        return [f"is {state!r}, not a mapping with loss_scale and unskipped"]
    faults = [f"has no {key!r}" for key in ("loss_scale", "unskipped") if key not in state]
    if faults:
        return faults
    if not _is_scale(state["loss_scale"]):
        allowed = "a finite number above 0 that float32 holds with its reciprocal"
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
