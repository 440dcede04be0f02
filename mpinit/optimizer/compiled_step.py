"""A compiled step: the optimizer's update and the rounding into the model in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class CompiledStep:
    """Runs an optimizer's step and what follows it as one compiled function.

    The learning rates go in as tensors while it runs, because a number would be compiled in: a scheduler would then
    have it compiled again at every step. Compilation happens at the first call.

    Args:
        optimizer: whose groups hold the learning rates.
        step: its step.
        after: called after the step, inside the same graph.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> step = CompiledStep(torch.optim.SGD([weight], lr=0.1), lambda: None, lambda: None)
        >>> step()
    """

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any], after: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._rates: list[torch.Tensor] = []

        def whole(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            after()
            return result

        self._compiled = torch.compile(whole)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        groups = self._optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        # The compiler fuses by itself, and torch's foreach code takes no learning rate that is a tensor.
        foreach = [group.get("foreach") for group in groups]
        while len(self._rates) < len(groups):
            self._rates.append(torch.zeros((), dtype=torch.float32))
        try:
            for group, number, rate in zip(groups, numbers, self._rates, strict=False):
                if not isinstance(number, torch.Tensor):
                    group["lr"] = rate.fill_(number)
                if group.get("foreach"):
                    group["foreach"] = None
            return self._compiled(*args, **kwargs)
        finally:
            for group, number, given in zip(groups, numbers, foreach, strict=True):
                group["lr"] = number
                if given:
                    group["foreach"] = given
