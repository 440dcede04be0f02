"""An optimizer that wraps another one, as frameworks and packages have them."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class Forwarding(Optimizer):
    """Shows the groups and the state of what it wraps as its own, without calling ``Optimizer.__init__``."""

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(group)
