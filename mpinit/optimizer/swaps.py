"""What an optimizer finds in the place of weights while its own code runs: its state, masters and their gradients."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..basics.bulk import are_same, grads_of, set_grads
from ..basics.running import without_gradients
from ..masters.masters import MasterBatch


class SwappedState:
    """The state of an optimizer as it is between steps, and the same entries under the masters.

    Attributes:
        outer: the state under the weights.
        inner: the state under the masters; kept from step to step, because the hash of a tensor is a call of Python.
    """

    def __init__(self, outer: Any, of_weight: Mapping[int, Any]) -> None:
        self.outer = outer
        self.inner = defaultdict(outer.default_factory) if isinstance(outer, defaultdict) else type(outer)()
        self.inner.update(zip([of_weight.get(id(key), key) for key in outer], outer.values(), strict=True))
        self._values = [*outer.values()]

    def is_as_seen(self, outer: Any) -> bool:
        """Return whether ``outer`` is the same state with the same values, which have the same keys then."""
        return outer is self.outer and are_same([*outer.values()], self._values)

    def bring_back(self, inner: Any, of_inner: Mapping[int, Any]) -> None:
        """Let the outer state have what the optimizer's code has left in the inner one, or in another in its place."""
        if inner is self.outer:
            return
        values = [*inner.values()]
        if are_same(values, self._values):
            return
        keys = [of_inner.get(id(key), key) for key in inner]
        self.outer.clear()
        self.outer.update(zip(keys, values, strict=True))
        self.inner, self._values = inner, values


@dataclass(eq=False)
class Part:
    """Some weights of an optimizer that are swapped together: all have masters on one device, or all have none.

    Attributes:
        weights, inner: the weights, and the parameter that replaces each while the optimizer's code runs.
        batch: their masters; None: these weights have none.
        set_to: the gradients that were set on the masters; None while the masters have no gradients.
        versions: the versions of those gradients that are copies of the weights', to find writes to them; empty if none
            is a copy.
        is_read: whether the masters have values that must be rounded into the weights.
    """

    weights: list[Any]
    inner: list[Any]
    batch: MasterBatch | None
    set_to: Sequence[torch.Tensor | None] | None = field(default=None, init=False)
    versions: Sequence[int | None] = field(default=(), init=False)
    is_read: bool = field(default=False, init=False)

    def read(self) -> None:
        """Set the masters to the float32 numbers that the weights mean."""
        if self.batch is not None:
            self.batch.read()
            self.is_read = True

    def set_gradients(self) -> None:
        """Set the masters' gradients to their weights', in float32."""
        if self.batch is None:
            return
        theirs = grads_of(self.weights)
        widened = self.batch.widened(theirs)
        set_grads(self.inner, widened)
        # Last: after an interruption before, masters without gradients would appear to have been cleared.
        self.set_to = widened
        if widened is not theirs and not are_same(widened, theirs):
            pairs = zip(widened, theirs, strict=True)
            self.versions = [None if mine is None or mine is its else mine._version for mine, its in pairs]

    @without_gradients
    def return_gradients(self, are_untouched: bool = False) -> None:
        """Do to the weights' gradients what the optimizer's code did to the masters': clear, replace or write them.

        Args:
            are_untouched: whether that code only reads them. Default False.
        """
        if self.set_to is None:
            return
        present = self.set_to if are_untouched else grads_of(self.inner)
        if not are_same(present, self.set_to):
            for weight, mine, before in zip(self.weights, present, self.set_to, strict=True):
                if mine is not before:
                    weight.grad = mine
        for weight, mine, before, version in zip(self.weights, present, self.set_to, self.versions, strict=False):
            was_written = version is not None and before is not None and mine is before and before._version != version
            if was_written and weight.grad is not None:
                weight.grad.copy_(before)
        self.set_to, self.versions = None, ()
        set_grads(self.inner, [None] * len(self.inner))

    def write(self) -> None:
        """Round the masters into their weights."""
        if self.is_read and self.batch is not None:
            self.batch.write()
            self.is_read = False
