"""Optimizers that step in two halves, called one by one: an overflow in either half skips both.

The first half climbs to where the loss is sharpest and keeps what the weights were, the second comes back and steps.
Skipped alone, either half would leave the climb, or inf, in the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from ..torch_internals.native_autocast import CastsOff
from .parameter_groups import ParameterGroups
from .snapshot import Snapshot
from .step import Step

# What sharpness-aware optimizers call them.
FIRST: Final = "first_step"
SECOND: Final = "second_step"


@final
class Halves:
    """The two halves of one optimizer's steps.

    Args:
        groups: its parameters.
        step: its step as a whole, which some of them make of the halves.
        keeps: whether there may be an overflow, for which the weights before the first half are kept.
        zero_grad: drops the gradients.
    """

    def __init__(self, groups: ParameterGroups, step: Step, keeps: bool, zero_grad: Callable[[], None]) -> None:
        self._groups = groups
        self._step = step
        self._keeps = keeps
        self._zero_grad = zero_grad
        self._before: Snapshot | None = None
        self._is_skipping = False

    def first(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The first half; nothing happens where its gradients overflowed, nor in the second half then."""
        if self._step.is_running:
            return inner(*args, **kwargs)
        self._prepare(FIRST)
        self._is_skipping = self._step.overflowed()
        if self._is_skipping:
            return self._clear(*args, **kwargs)
        self._before = Snapshot(self._groups) if self._keeps else None
        with CastsOff():
            return inner(*args, **kwargs)

    def second(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The second half; where gradients overflowed the weights are what they were before the first."""
        if self._step.is_running:
            return inner(*args, **kwargs)
        self._prepare(SECOND)
        before, self._before = self._before, None
        skips, self._is_skipping = self._is_skipping, False
        if skips or self._step.overflowed():
            if before is not None:
                before.restore()
            self._step.skip()
            self._step.tell_observers()
            return self._clear(*args, **kwargs)
        counts = self._step.counter.read()
        with CastsOff():
            result = inner(*args, **kwargs)
        if self._step.counter.read() == counts:
            self._step.counter.count(skipped=False)
            self._step.tell_observers()
        return result

    def _prepare(self, name: str) -> None:
        self._step.prepare(f"optimizer.{name}()")
        self._step.check_gradients()

    def _clear(self, zero_grad: bool = False, *_: Any, **__: Any) -> None:
        if zero_grad:
            self._zero_grad()
