"""No masters: optimizers step the model's own parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from .pairs import Pair
from .store import Gradients, MasterStore
from .two_copies import TwoCopies


@final
class NoMasters(MasterStore):
    """The store of levels without masters: it never makes a pair."""

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Every optimizer can step a model's own parameters."""

    def make(self, weight: nn.Parameter, dtype: torch.dtype) -> Pair | None:
        """None, whatever the weight."""
        return None

    def finish(self, pairs: Sequence[Pair]) -> None:
        """There are no pairs."""

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
        """True: parameters hold their own gradients."""
        return True

    @contextmanager
    def stepping(
        self, optimizer: Optimizer, copies: TwoCopies, rounds_itself: bool = False
    ) -> Iterator[Iterator[None]]:
        """One step."""
        with self.watcher:
            yield iter((None,))

    def step_with_closure(
        self, optimizer: Optimizer, copies: TwoCopies, step: Callable[[Callable[[], Any] | None], Any], closure: Any
    ) -> Any:
        """The optimizer evaluates the closure itself."""
        return step(closure)
