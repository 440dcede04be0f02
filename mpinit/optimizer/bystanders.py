"""Gradients that a scaled loss leaves on parameters whose optimizers do not take part: they must not come to a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

import torch
from torch import nn

from ..scaling.scaled_loss import Bystanders, TakesPart
from ..scaling.scaler import LossScaler


@final
class OtherParameters(Bystanders):
    """A session's parameters that are stepped by nobody who takes part in the backward pass at hand.

    Args:
        members: for those who take part, every other parameter of the session.
    """

    def __init__(self, members: Callable[[Sequence[TakesPart]], Iterable[nn.Parameter]]) -> None:
        self._members = members
        self._before: list[tuple[nn.Parameter, torch.Tensor | None, int]] = []
        self._reached: dict[nn.Parameter, torch.Tensor] = {}

    def before_backward(self, parts: Sequence[TakesPart], scaler: LossScaler) -> None:
        """Take down gradients and their versions, where anything is scaled."""
        if not scaler.is_identity:
            gradients = ((parameter, parameter.grad) for parameter in self._members(parts))
            self._before = [(p, gradient, -1 if gradient is None else gradient._version) for p, gradient in gradients]

    def after_backward(self) -> None:
        """Compare."""
        before, self._before = self._before, []
        for parameter, gradient, version in before:
            now = parameter.grad
            if now is not None and (now is not gradient or now._version != version):
                self._reached[parameter] = now

    def reached(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter still has a gradient which a scaled loss has reached."""
        gradient = self._reached.get(parameter) if self._reached else None
        return gradient is not None and parameter.grad is gradient

    def still_reached(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients of these parameters are other tensors now, but as scaled as they were."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._reached[parameter] = parameter.grad

    def reached_one_of(self, parameters: Iterable[nn.Parameter]) -> nn.Parameter | None:
        """One of these parameters that still has a gradient which a scaled loss has reached; None where none has."""
        if not self._reached:
            return None
        for parameter in parameters:
            gradient = self._reached.get(parameter)
            if gradient is not None:
                if parameter.grad is gradient:
                    return parameter
                del self._reached[parameter]
        return None
