"""Masters that are the model's own parameters: float32 in the model and in the optimizer, 16-bit inside forwards alone.

There is one number and one place for it. What is kept here is only what tells a cast that it is still its parameter's:
steps of the session's optimizers, and writes that leave no trace in a version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.dtypes import is_lower_precision
from ..distributed.sharding import set_data
from ..torch_internals.parameter_watching import TENSOR_DATA
from .pairs import Pair
from .store import Gradients, MasterStore
from .two_copies import TwoCopies

Mark = tuple[int, list[tuple[int, int, bool]]]


@final
class MastersInModel(MasterStore):
    """The store of ``master_weights="model"``: it makes no pair, and widens what came in 16-bit.

    Example:
        >>> store, weight = MastersInModel(), nn.Parameter(torch.ones(2))
        >>> mark = store.mark([weight])
        >>> store.stands([weight], mark)
        True
        >>> _ = weight.data.mul_(2)
        >>> store.stands([weight], mark)
        False
        >>> store.close()
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0
        self._watched: set[int] = set()
        # What came in 16-bit, as long as the set-up may fail.
        self._came_in: dict[nn.Parameter, torch.dtype] | None = {}

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Every optimizer can step a model's own float32 parameters."""

    def make(self, weight: nn.Parameter, dtype: torch.dtype) -> Pair | None:
        """None: a weight is its own master, and float32 from here on."""
        if is_lower_precision(weight.dtype):
            if self._came_in is not None:
                self._came_in[weight] = weight.dtype
            _convert(weight, torch.float32)
        return None

    def finish(self, pairs: Sequence[Pair]) -> None:
        """The set-up has succeeded: what came in 16-bit is float32 for good."""
        self._came_in = None

    def narrow(self) -> None:
        """Where the set-up has failed: weights are what they came in as."""
        for weight, dtype in (self._came_in or {}).items():
            _convert(weight, dtype)

    def as_held(self, gradients: Gradients) -> Gradients:
        """The gradients (of no pairs)."""
        return gradients

    def are_plain(self, copies: TwoCopies, gradients: Gradients, device: torch.device) -> bool:
        """True: there are none that are not."""
        return True

    @property
    def steps_in_parts(self) -> bool:
        """False: there is nothing to put together."""
        return False

    def adds_up_natively(self) -> bool:
        """True: parameters hold their own gradients, in float32."""
        return True

    @contextmanager
    def stepping(
        self, optimizer: Optimizer, copies: TwoCopies, rounds_itself: bool = False
    ) -> Iterator[Iterator[None]]:
        """One step, after which every cast is of another number, however the optimizer writes."""
        try:
            with self.watcher:
                yield iter((None,))
        finally:
            self._steps += 1

    def step_with_closure(
        self, optimizer: Optimizer, copies: TwoCopies, step: Callable[[Callable[[], Any] | None], Any], closure: Any
    ) -> Any:
        """The optimizer evaluates the closure itself, each time on what it has written."""

        def evaluate() -> Any:
            self._steps += 1
            with self.watcher.listening():
                return closure()

        try:
            with self.watcher:
                return step(evaluate)
        finally:
            self._steps += 1

    # -- what casts ask -----------------------------------------------------------------------------------------

    def mark(self, parameters: Sequence[nn.Parameter]) -> Mark:
        """What :meth:`stands` compares with: taken when parameters are cast. From here on they are watched."""
        for parameter in parameters:
            if id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                self.watcher.watch(parameter)
            elif parameter in self.watcher.handed_out:
                self.watcher.forget(parameter)
        return self._now(parameters)

    def stands(self, parameters: Sequence[nn.Parameter], mark: Mark) -> bool:
        """Whether nobody can have written to a parameter since. Somebody who holds its memory may any time."""
        handed_out = self.watcher.handed_out
        return mark == self._now(parameters) and not (handed_out and any(p in handed_out for p in parameters))

    def _now(self, parameters: Sequence[nn.Parameter]) -> Mark:
        return self._steps, [(p._version, p.data_ptr(), p.requires_grad) for p in parameters]


def _convert(weight: nn.Parameter, dtype: torch.dtype) -> None:
    """Give a parameter another type, and its gradient with it."""
    if weight.dtype != dtype:
        gradient, weight.grad = weight.grad, None
        set_data(weight, TENSOR_DATA.__get__(weight).to(dtype))
        weight.grad = None if gradient is None else gradient.to(dtype)
