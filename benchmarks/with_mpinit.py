"""mpinit as a contender, through its public functions; only native code is switched off through an internal one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from torch import Tensor

from .case import Unavailable
from .contenders import Contender, torch_optimizer
from .tasks import Task


class Mpinit(Contender):
    """Training with mpinit: ``scale_loss`` around backward; the end of that block is ``finish_gradients``.

    Args:
        native: False: this process does not use native code, even if it is built.
    """

    def __init__(self, task: Task, opt_level: str, native: bool = True, **properties: Any) -> None:
        super().__init__(task)
        try:
            import mpinit
        except ImportError as error:
            raise Unavailable(f"mpinit cannot be imported: {error}") from error
        self.mpinit: Any = mpinit
        if not native:
            from mpinit.torch_internals.native import use_native

            use_native(None)
        self.scaling: AbstractContextManager[Tensor]
        self.mpinit.initialize(self.model, self.optimizer, opt_level, **properties)

    def backward(self, loss: Tensor) -> None:
        self.scaling = self.mpinit.scale_loss(loss, self.optimizer)
        self.scaling.__enter__().backward()  # type: ignore[no-untyped-call]

    def finish_gradients(self) -> None:
        self.scaling.__exit__(None, None, None)


class InBackward(Mpinit):
    """An optimizer for each parameter, which a post-accumulate-grad hook steps in the backward pass."""

    optimizer: Any

    def __init__(self, task: Task, **properties: Any) -> None:
        super().__init__(task, skip_nonfinite=False, **properties)
        of = dict(zip(self.model.parameters(), self.optimizer, strict=True))

        def step(parameter: Tensor) -> None:
            of[parameter].step()
            of[parameter].zero_grad()

        for parameter in of:
            parameter.register_post_accumulate_grad_hook(step)

    def make_optimizer(self) -> Any:
        return [torch_optimizer(self.task.rule, [parameter]) for parameter in self.model.parameters()]

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def finish_gradients(self) -> None:
        """Do nothing: each parameter was stepped in backward."""

    def update(self) -> None:
        """Do nothing: each parameter was stepped in backward."""

    def states(self) -> Iterable[Any]:
        return chain.from_iterable(optimizer.state.values() for optimizer in self.optimizer)

    def gradient_carriers(self) -> Iterable[Tensor]:
        return ()
