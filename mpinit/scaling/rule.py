"""How a loss scale acts and moves: three rules with the same verbs, so that nobody has to ask which is in force.

A rule has no state of its own: it acts on what a scaler keeps. Dynamic scaling is that of Micikevicius et al., "Mixed
Precision Training" (2018), section 3.2, with the hysteresis of Megatron-LM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch

from ..plan import ScalingRule


@dataclass
class ScaleState:
    """What a scaler keeps: 0-dimensional tensors on one device.

    Attributes:
        scale: the scale in force, float32.
        unskipped: good updates since the scale last moved, int32; below the rule's growth interval.
        tolerance: overflows left until the scale backs off, int32; 0 once exhausted, until the scale grows.
    """

    scale: torch.Tensor
    unskipped: torch.Tensor
    tolerance: torch.Tensor


class Scaling(ABC):
    """What a loss scale does to a loss, and what an overflow does to it."""

    @abstractmethod
    def scaled(self, loss: torch.Tensor, state: ScaleState) -> torch.Tensor:
        """``loss`` (float32 or float64) times the scale; differentiable."""

    @abstractmethod
    def noted(self, before: torch.Tensor | None, found_inf: torch.Tensor, state: ScaleState) -> torch.Tensor | None:
        """What is to be kept of a check until the next update: above 0 where it or one before found inf or nan."""

    @abstractmethod
    def move(self, state: ScaleState, found_inf: torch.Tensor) -> None:
        """Move the scale by what was noted."""

    @abstractmethod
    def resumed(self, scale: float) -> float:
        """The scale to go on with where a state with ``scale`` is loaded."""


@final
class NoScaling(Scaling):
    """The scale is 1 for good, and the loss goes in as it is."""

    def scaled(self, loss: torch.Tensor, state: ScaleState) -> torch.Tensor:
        return loss

    def noted(self, before: torch.Tensor | None, found_inf: torch.Tensor, state: ScaleState) -> torch.Tensor | None:
        return None

    def move(self, state: ScaleState, found_inf: torch.Tensor) -> None:
        return

    def resumed(self, scale: float) -> float:
        return 1.0


@final
@dataclass(frozen=True)
class StaticScaling(Scaling):
    """The scale is what the user asked for, whatever happens and whatever is loaded."""

    scale: float

    def scaled(self, loss: torch.Tensor, state: ScaleState) -> torch.Tensor:
        return loss * state.scale

    def noted(self, before: torch.Tensor | None, found_inf: torch.Tensor, state: ScaleState) -> torch.Tensor | None:
        return None

    def move(self, state: ScaleState, found_inf: torch.Tensor) -> None:
        return

    def resumed(self, scale: float) -> float:
        return self.scale


@final
@dataclass(frozen=True)
class DynamicScaling(Scaling):
    """The scale grows after good updates and backs off on overflow, within its limits."""

    numbers: ScalingRule

    def scaled(self, loss: torch.Tensor, state: ScaleState) -> torch.Tensor:
        return loss * state.scale

    def noted(self, before: torch.Tensor | None, found_inf: torch.Tensor, state: ScaleState) -> torch.Tensor | None:
        found_inf = found_inf.to(state.scale.device)
        return found_inf.clone() if before is None else torch.maximum(before, found_inf)

    def move(self, state: ScaleState, found_inf: torch.Tensor) -> None:
        rule = self.numbers
        if rule.hysteresis > 1:
            found_inf = self._tolerate(state, found_inf)
        torch._amp_update_scale_(
            state.scale, state.unskipped, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
        )
        state.scale.clamp_(rule.min_scale, rule.max_scale)

    def _tolerate(self, state: ScaleState, found_inf: torch.Tensor) -> torch.Tensor:
        """Count an overflow against the hysteresis; only one that exhausts it is handed on."""
        overflow = found_inf > 0
        grows = ~overflow & (state.unskipped + 1 >= self.numbers.growth_interval)
        state.tolerance.sub_(overflow.int()).clamp_(min=0)
        backs_off = overflow & (state.tolerance == 0)
        state.tolerance.masked_fill_(grows, self.numbers.hysteresis)
        # A tolerated overflow still ends the run of good steps; -1 because the update counts it as a good one.
        state.unskipped.masked_fill_(overflow & ~backs_off, -1)
        return backs_off.float()

    def resumed(self, scale: float) -> float:
        rule = self.numbers
        return min(max(scale, rule.min_scale), rule.max_scale)


def scaling_by(numbers: ScalingRule) -> Scaling:
    """The rule that a plan's numbers describe.

    Example:
        >>> type(scaling_by(ScalingRule(False, 1.0, 2.0, 0.5, 2000, 1, 2.0**-126, 2.0**24, 64))).__name__
        'NoScaling'
    """
    if numbers.dynamic:
        return DynamicScaling(numbers)
    return NoScaling() if numbers.init_scale == 1.0 else StaticScaling(numbers.init_scale)
