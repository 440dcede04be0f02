"""What an optimizer's groups switch on, with which it was found to update each parameter by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch.optim import Optimizer

from ..masters.options import switched_on
from ..masters.per_parameter import is_known


@final
class Switches:
    """The options of an optimizer that is stepped in parts: one that comes into play later is tried as well.

    Args:
        optimizer: the optimizer.
        check: raises where it cannot be stepped in parts; None: it is not.
    """

    def __init__(self, optimizer: Optimizer, check: Callable[[], None] | None) -> None:
        self._optimizer = optimizer
        # What is known of torch's own holds with every option.
        self._check = None if is_known(optimizer) else check
        self._seen: list[Any] = [] if self._check is None else switched_on(optimizer)

    def look(self) -> None:
        """Before a step, and when a group was added.

        Raises:
            ValueError: with what is switched on now it cannot be stepped in parts.
        """
        if self._check is None:
            return
        now = switched_on(self._optimizer)
        if now != self._seen:
            self._check()
            self._seen = now
