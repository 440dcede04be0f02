"""Some weights of an optimizer, whose masters are read, get their gradients and are rounded together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from ..basics.bulk import are_same, grads_of, set_grads
from ..basics.running import bucket_bytes_at_most, without_gradients
from ..distributed.sharding import shard
from ..masters.masters import MasterBatch

# Float32 bytes of the bucket of parameters that a step of split masters or encoded states updates at a time.
BUCKET_BYTES: Final = 64 * 2**20


@dataclass(eq=False)
class Part:
    """Some weights of an optimizer: all have masters on one device, or all have none.

    Attributes:
        weights, inner: the weights, and the parameter that replaces each while the optimizer's code runs.
        batch: their masters; None: these weights have none.
        set_to: the gradients that were set on the masters; None while the masters have no gradients.
        versions: the versions of those gradients that are copies of the weights', to find writes to them; empty if none
            is a copy.
        is_read: whether the masters have values that must be rounded into the weights.
        hidden: the gradients of weights without masters, while other parts are stepped; None if they are not hidden.
    """

    weights: list[Any]
    inner: list[Any]
    batch: MasterBatch | None = None
    set_to: Sequence[torch.Tensor | None] | None = field(default=None, init=False)
    versions: Sequence[int | None] = field(default=(), init=False)
    is_read: bool = field(default=False, init=False)
    hidden: list[torch.Tensor | None] | None = field(default=None, init=False)

    def read(self) -> None:
        """Set the masters to the float32 numbers that the weights mean."""
        if self.batch is not None:
            self.batch.read()
            self.is_read = True

    def set_gradients(self) -> None:
        """Set the masters' gradients to their weights', in float32; or show those that are hidden."""
        if self.batch is None:
            if self.hidden is not None:
                set_grads(self.weights, self.hidden)
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
    def return_gradients(self, are_untouched: bool) -> None:
        """Do to the weights' gradients what the optimizer's code did to the masters': clear, replace or write them.

        Args:
            are_untouched: whether that code only reads them.
        """
        if self.hidden is not None:
            self.hide_gradients()  # the optimizer may have cleared some
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

    def hide_gradients(self) -> None:
        """Take the gradients of weights without masters away, while other parts are stepped."""
        self.hidden = grads_of(self.weights)
        set_grads(self.weights, [None] * len(self.weights))

    def show_gradients(self) -> None:
        """Reverse :meth:`hide_gradients`."""
        if self.hidden is not None:
            set_grads(self.weights, self.hidden)
            self.hidden = None

    def write(self) -> None:
        """Round the masters into their weights."""
        if self.is_read and self.batch is not None:
            self.batch.write()
            self.is_read = False


def in_buckets(weights: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide weights into buckets: of one device, limited by the bytes of their float32 numbers.

    Large ones come first, so that the small ones are together, and are copied into one piece. Weights of odd sizes are
    last: compiled functions take neighbours in pairs.
    """
    buckets: list[list[nn.Parameter]] = []
    room: dict[torch.device, tuple[list[nn.Parameter], int]] = {}
    for weight in sorted(weights, key=lambda each: (shard(each).numel() % 2, -shard(each).numel())):
        size = 8 * shard(weight).numel()
        bucket, remaining = room.get(weight.device, (None, 0))
        if bucket is None or remaining < size:
            bucket, remaining = [], bucket_bytes_at_most(weight.device, BUCKET_BYTES)
            buckets.append(bucket)
        bucket.append(weight)
        room[weight.device] = bucket, remaining - size
    return buckets
