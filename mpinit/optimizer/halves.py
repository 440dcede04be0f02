"""Optimizers that step in two halves, called one by one: an overflow in either half skips both.

The first half climbs to where the loss is sharpest and keeps what the weights were, the second comes back and steps.
Skipped alone, either half would leave the climb, or inf, in the weights.
"""

from typing import Any, Final

from ..model.forward_weights import renew_casts
from ..torch_internals.native_autocast import CastsOff
from .members import Snapshot

# What sharpness-aware optimizers call them.
FIRST: Final = "first_step"
SECOND: Final = "second_step"


class Halves:
    """The two halves of one optimizer's steps."""

    def __init__(self, managed: Any) -> None:
        self._managed = managed
        self._before: Snapshot | None = None
        self._is_skipping = False

    def first(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """The first half; nothing happens where its gradients overflowed, nor in the second half then."""
        managed = self._managed
        managed.prepare(f"optimizer.{FIRST}()")
        self._is_skipping = managed.overflowed()
        if self._is_skipping:
            return self._clear(*args, **kwargs)
        self._before = Snapshot(managed.members) if managed.skips else None
        with CastsOff(), managed.scope.open():
            return inner(*args, **kwargs)

    def second(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """The second half; where gradients overflowed the weights are what they were before the first."""
        managed = self._managed
        managed.prepare(f"optimizer.{SECOND}()")
        before, self._before = self._before, None
        skips, self._is_skipping = self._is_skipping, False
        if skips or managed.overflowed():
            if before is not None:
                before.restore()
            managed.skip()
            renew_casts()
            return self._clear(*args, **kwargs)
        with CastsOff(), managed.scope.open():
            result = inner(*args, **kwargs)
        managed.count_done()
        managed.gradients.stepped()
        renew_casts()
        return result

    def _clear(self, zero_grad: bool = False, *_: Any, **__: Any) -> None:
        if zero_grad:
            self._managed.optimizer.zero_grad()
