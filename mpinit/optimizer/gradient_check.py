"""Gradients that did not come through ``scale_loss``, or did not come at all: noticed before a step uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import nn

from ..basics.user_warnings import warn_user
from .bystanders import OtherParameters
from .gradient_cycle import GradientCycle
from .parameter_groups import ParameterGroups
from .ranks import Ranks


@final
class GradientCheck:
    """What one optimizer's gradients have to be for a step.

    Args:
        groups: its parameters.
        cycle: the state of its gradients.
        bystanders: who knows of gradients that are still scaled.
        ranks: who knows of parameters that shards were put in the places of.
        scales: whether any loss of the session is scaled at all.
        name_of: a parameter's dotted name.
    """

    def __init__(
        self,
        groups: ParameterGroups,
        cycle: GradientCycle,
        bystanders: OtherParameters,
        ranks: Ranks,
        scales: bool,
        name_of: Callable[[torch.Tensor], str],
    ) -> None:
        self._groups = groups
        self._cycle = cycle
        self._bystanders = bystanders
        self._ranks = ranks
        self._scales = scales
        self._name_of = name_of
        self._warned = self._warned_of_nothing = False

    def check(self, is_stepping: bool) -> None:
        """Notice that scale_loss was forgotten: an error where gradients would be ignored or scaled, else a warning.

        Args:
            is_stepping: whether this is for a step, and not for somebody who looks at the gradients.

        Raises:
            RuntimeError: gradients would be ignored, or are scaled.
        """
        cycle, copies = self._cycle, self._groups.copies
        cycle.check_unscaled("optimizer.step() or mpinit.master_params() was called", self._groups.model_params())
        scaled = self._bystanders.reached_one_of([*copies.weights, *self._groups.plain])  # type: ignore[list-item]
        if scaled is not None:
            raise RuntimeError(
                f"the gradient of {self._name_of(scaled)!r} is scaled: the loss of another optimizer was scaled and "
                "reached it. Pass both optimizers to mpinit.scale_loss, or clear the gradient (optimizer.zero_grad()) "
                "before the backward pass that is to count"
            )
        if cycle.saw_scale_loss or cycle.saw_unscaling:
            copies.look_at_gradients()
            if self._groups.are_without_gradients():
                self._notice_nothing(is_stepping)
            return
        stray = copies.left_by_backward() if self._scales else None
        if stray is not None:
            raise RuntimeError(self._forgotten(stray.model_param))
        copies.look_at_gradients()
        if self._scales and not self._warned and any(p.grad is not None for p in self._groups.present()):
            self._warned = True
            warn_user(
                "optimizer.step() uses gradients that did not come through mpinit.scale_loss: they were not scaled "
                "(small ones may have become 0 in 16 bit) and not checked. Use "
                "`with mpinit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
            )

    def _is_beside_the_model(self) -> bool:
        cycle, present = self._cycle, self._groups.present()
        return cycle.saw_scale_loss and not cycle.was_reached and any(parameter.requires_grad for parameter in present)

    def _notice_nothing(self, is_stepping: bool) -> None:
        """A loss was scaled, and no parameter has a gradient: cleared since, or the loss did not reach any."""
        if self._cycle.found_inf is not None:
            if not self._cycle.is_agreed:
                self._cycle.forget_overflow()
        elif is_stepping and not self._warned_of_nothing and self._is_beside_the_model():
            self._warned_of_nothing = True
            self._ranks.check_present()
            warn_user(
                "optimizer.step() does nothing: a loss was scaled, and none of its parameters has a gradient. "
                "They are not those that the model computes with (was it copied, or wrapped in something that replaces "
                "them, after the optimizer was made?), or the loss makes no use of any"
            )

    def _forgotten(self, weight: nn.Parameter) -> str:
        return (
            f"parameter {self._name_of(weight)!r} has a gradient that its float32 master does not, so step() "
            "would ignore it: backward() ran outside of mpinit.scale_loss. Use "
            "`with mpinit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
        )
