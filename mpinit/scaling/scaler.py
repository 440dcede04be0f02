"""Loss scaling: a rule, and a scaler that follows it with its state on the device of the loss.

Static scaling and "no scaling" are scalers whose scale never moves, so that nobody has to ask which is in force.
The update rule is that of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2, with the hysteresis of
Megatron-LM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..plan import ScalingRule


class LossScaler:
    """A loss scale and its counters.

    The state is a few 0-dimensional tensors on the loss's device: updating them never waits for the device, and
    they are read only when somebody asks.

    Args:
        rule: how the scale moves.

    Example:
        >>> rule = ScalingRule(True, 8.0, 2.0, 0.5, 2000, 1, 2.0**-126, 2.0**24, 64)
        >>> scaler = LossScaler(rule)
        >>> scaler.note(torch.tensor(1.0)); scaler.update(); scaler.loss_scale()
        4.0
    """

    def __init__(self, rule: ScalingRule) -> None:
        self.rule = rule
        self._scale = torch.tensor(rule.init_scale, dtype=torch.float32)
        self._unskipped = torch.zeros((), dtype=torch.int32)
        self._tolerance = torch.tensor(rule.hysteresis, dtype=torch.int32)
        self._noted: torch.Tensor | None = None

    @property
    def is_identity(self) -> bool:
        """Whether scaling by this scaler changes nothing, now and ever."""
        return not self.rule.dynamic and self.rule.init_scale == 1.0

    @property
    def device(self) -> torch.device:
        """Where the state is: the device of the last loss scaled."""
        return self._scale.device

    def to(self, device: torch.device) -> None:
        """Move the state to ``device``; nothing happens where it is there already."""
        if self._scale.device != device:
            self._scale = self._scale.to(device)
            self._unskipped = self._unskipped.to(device)
            self._tolerance = self._tolerance.to(device)
            self._noted = None if self._noted is None else self._noted.to(device)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` in float32, times the scale; differentiable.

        Args:
            loss: a floating tensor of any shape.

        Returns:
            A float32 tensor of the same shape (float64 stays float64).
        """
        loss = loss if loss.dtype == torch.float64 else loss.float()
        if self.is_identity:
            return loss
        self.to(loss.device)
        return loss * self._scale

    def inverse_scale(self) -> torch.Tensor:
        """The reciprocal of the scale: 0-dimensional, float32, on the scaler's device; rounded once."""
        return self._scale.double().reciprocal().float()

    def loss_scale(self) -> float:
        """The scale in force, as a float. Waits for the device."""
        return float(self._scale.item())

    def set_scale(self, scale: float) -> None:
        """Put the scale to ``scale``, a finite number above 0; the growth counter is kept.

        Raises:
            ValueError: ``scale`` is 0, negative, inf or nan.
        """
        if not math.isfinite(scale) or scale <= 0:
            raise ValueError(f"a loss scale of {scale} cannot be undone; give a finite number above 0")
        self._scale.fill_(scale)

    @property
    def unskipped(self) -> int:
        """Good updates since the scale last moved."""
        return int(self._unskipped.item())

    @unskipped.setter
    def unskipped(self, count: int) -> None:
        self._unskipped.fill_(count)

    @property
    def has_notes(self) -> bool:
        """Whether gradients were checked that no update has taken into account yet."""
        return self._noted is not None

    def note(self, found_inf: torch.Tensor) -> None:
        """Take down the outcome of one check: a 0-dimensional float32 tensor, above 0 where it found inf or nan."""
        if self.rule.dynamic:
            found_inf = found_inf.to(self._scale.device)
            self._noted = found_inf.clone() if self._noted is None else torch.maximum(self._noted, found_inf)

    def update(self) -> None:
        """Move the scale by what was noted since the last update; without notes nothing happens."""
        found_inf, self._noted = self._noted, None
        if found_inf is None:
            return
        rule = self.rule
        if rule.hysteresis > 1:
            found_inf = self._tolerate(found_inf)
        torch._amp_update_scale_(
            self._scale, self._unskipped, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
        )
        self._scale.clamp_(rule.min_scale, rule.max_scale)

    def _tolerate(self, found_inf: torch.Tensor) -> torch.Tensor:
        """Count an overflow against the hysteresis; only one that exhausts it is handed on."""
        overflow = found_inf > 0
        grows = ~overflow & (self._unskipped + 1 >= self.rule.growth_interval)
        self._tolerance.sub_(overflow.int()).clamp_(min=0)
        backs_off = overflow & (self._tolerance == 0)
        self._tolerance.masked_fill_(grows, self.rule.hysteresis)
        # A tolerated overflow still ends the run of good steps; -1 because the update counts it as a good one.
        self._unskipped.masked_fill_(overflow & ~backs_off, -1)
        return backs_off.float()

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers: ``loss_scale`` and ``unskipped``, and ``tolerance`` where hysteresis counts."""
        state: dict[str, Any] = {"loss_scale": self.loss_scale(), "unskipped": self.unskipped}
        if self.rule.hysteresis > 1:
            state["tolerance"] = int(self._tolerance.item())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`; :func:`check_state` says beforehand whether it fits."""
        self.set_scale(float(state["loss_scale"]))
        self.unskipped = int(state["unskipped"])
        self._tolerance.fill_(int(state.get("tolerance", self.rule.hysteresis)))
        self._noted = None


def check_state(state: Any) -> list[str]:
    """What keeps ``state`` from being a loss scaler's state, a line each; empty where nothing does.

    Example:
        >>> check_state({"loss_scale": 8.0, "unskipped": 0})
        []
    """
    if not isinstance(state, Mapping):
        return [f"is {state!r}, not a mapping with loss_scale and unskipped"]
    faults = [f"has no {key!r}" for key in ("loss_scale", "unskipped") if key not in state]
    if faults:
        return faults
    scale, unskipped = state["loss_scale"], state["unskipped"]
    if not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale <= 0:
        faults.append(f"has loss_scale={scale!r}, not a finite number above 0")
    if not isinstance(unskipped, int) or unskipped < 0:
        faults.append(f"has unskipped={unskipped!r}, not a count")
    return faults
