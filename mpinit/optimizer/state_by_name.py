"""An optimizer's state under the names of the model's weights, as ``torch.distributed.checkpoint`` asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from ..torch_internals.optimizer_state_by_name import ShownByWeights
from .backward import BackwardPass
from .gradient_cycle import GradientCycle
from .parameter_groups import ParameterGroups
from .step import Step


@final
class StateByName(ShownByWeights):
    """What one optimizer shows.

    Args:
        groups: its parameters.
        cycle: the state of its gradients.
        backward: clears gradients.
        step: its step.
    """

    def __init__(self, groups: ParameterGroups, cycle: GradientCycle, backward: BackwardPass, step: Step) -> None:
        super().__init__(groups.optimizer)
        self._groups = groups
        self._cycle = cycle
        self._backward = backward
        self._step = step

    def weight_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The weight of a master; any other parameter itself."""
        pair = self._groups.store.pairs.of(parameter)
        return parameter if pair is None else pair.model_param

    def make_state(self, make: Callable[[Any], None]) -> None:
        """As in torch, in float32 on the masters; fails with everything as it was.

        Raises:
            RuntimeError: gradients are scaled at the moment.
        """
        optimizer, groups = self.optimizer, self._groups
        groups.refresh()
        if optimizer.state:
            return
        self._cycle.check_closed("torch.distributed.checkpoint, for an optimizer without state,", "move it before")
        groups.copies.look_at_both()
        groups.copies.look_at_trained()
        groups.copies.look_at_gradients()
        rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
        had_gradients = any(parameter.grad is not None for parameter in groups.present())
        try:
            make(_WithoutState(groups, self._backward, self._step))
        except BaseException:
            for group, rate in rates:
                group["lr"] = rate
            optimizer.state.clear()
            if not had_gradients:
                self._backward.clear()
            raise


@final
class _WithoutState:
    """An optimizer while its state is made: its groups and state, and a step that is none."""

    def __init__(self, groups: ParameterGroups, backward: BackwardPass, step: Step) -> None:
        self.param_groups = groups.optimizer.param_groups
        self.state = groups.optimizer.state
        self._backward = backward
        self._step = step

    def step(self, closure: None = None) -> None:
        """Step with the gradients and learning rates there are, uncounted."""
        self._step.make_state()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self._backward.clear()
