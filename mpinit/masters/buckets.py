"""Buckets of split masters: as many weights as are materialised in float32 at a time, and the memory for it."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from sys import getrefcount
from typing import Final, TypeVar

import torch

from ..basics.checksum import BLOCK, checksums
from ..basics.dtypes import is_lower_precision
from ..basics.gradients import as_float32
from ..basics.interrupts import InterruptsHeld
from ..distributed.sharding import in_place_of, is_sharded, placed_as, shard, sharded_as
from ..torch_internals.allocator import storage_holders
from ..torch_internals.columns import addresses_of, grads_of, set_grads, set_memory
from ..torch_internals.devices import bucket_bytes_at_most
from ..torch_internals.native_autocast import CastsOff
from ..torch_internals.parameter_watching import TENSOR_DETACH, TENSOR_GRAD
from .float_split import add_remainder_, flat, take_remainder_
from .pairs import Pair
from .split_kernels import are_ready, has_words, is_large, join_, long_words, take_apart_, words
from .split_pair import SplitPair, is_placeholder, placeholder_of_shard

AnyPair = TypeVar("AnyPair", bound=Pair)

# A buffer up to this size stays from step to step, laid out: for small weights that takes longer than the step.
_KEPT_BYTES: Final = 4 * 2**20
_HELD_ONCE: Final = next(map(getrefcount, [torch.empty(0)]))


class _Stage(enum.Enum):
    """Where a bucket's float32 numbers are: in weights and remainders, in the buffer, or on their way back."""

    AT_REST = enum.auto()
    MATERIALISED = enum.auto()
    TAKEN_APART = enum.auto()


@dataclass
class _Layout:
    """A buffer as one bucket sees it: first its masters, then their gradients."""

    buffer: torch.Tensor
    bits: torch.Tensor
    long_words: list[torch.Tensor]
    parts: list[torch.Tensor]
    wide: list[torch.Tensor]
    gaps: list[torch.Tensor]
    masters: list[torch.Tensor]
    addresses: list[int]
    gradients: list[torch.Tensor]
    strides: list[tuple[int, ...]]
    holders: int

    def is_ours_alone(self) -> bool:
        """Whether nobody, a custom optimizer's state say, holds on to a gradient or master that lies in the buffer."""
        held = max(map(getrefcount, self.gradients)), max(map(getrefcount, self.masters))
        return held == (_HELD_ONCE, _HELD_ONCE) and storage_holders(self.buffer) == self.holders


class Bucket:
    """Split pairs on one device that are materialised together; their remainders and checksums lie in one tensor each.

    Args:
        pairs: each with a remainder and checksums in whole blocks, which become parts of the bucket's; large weights
            (:func:`large_first`) are put together and taken apart by kernels where there are some.
    """

    def __init__(self, pairs: Sequence[SplitPair]) -> None:
        self.pairs = list(pairs)
        self._weights: list[torch.Tensor] = [pair.model_param for pair in pairs]
        self._masters: list[torch.Tensor] = [pair.master_param for pair in pairs]
        self._is_sharded = any(is_sharded(weight) for weight in self._weights)
        self._sizes = [weight.numel() for weight in self._shards()]
        self._rooms = [pair.remainder.numel() for pair in pairs]
        with CastsOff():  # a set-up may be inside an autocast block, which refuses to join integers
            self.remainder = torch.cat([pair.remainder for pair in pairs])
            self._checksums = torch.cat([pair.checksums for pair in pairs])
        blocks = [room // BLOCK for room in self._rooms]
        parts = self.remainder.split_with_sizes(self._rooms), self._checksums.split_with_sizes(blocks)
        for pair, remainder, sums in zip(pairs, *parts, strict=True):
            pair.remainder, pair.checksums, pair.bucket = remainder, sums, self
        self._large = len(list(takewhile(is_large, self._shards())))
        self._remainder_words = [words(pair.remainder) for pair in pairs[: self._large]]
        self._sums = [pair.checksums.view(-1, 1) for pair in pairs[: self._large]]
        self._by_kernel = self._begin = 0
        self.device = self.remainder.device
        self.numel = self.remainder.numel()
        self._placeholders = [placeholder_of_shard(weight) for weight in self._weights]
        self._views: list[torch.Tensor] = []
        self._halves: list[torch.Tensor] = []
        self._words: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._layout: _Layout | None = None
        self._strides: list[tuple[int, ...]] = []
        self._stage = _Stage.AT_REST

    def _shards(self) -> list[torch.Tensor]:
        """The weights, or this process's parts of them; which they are now, for they may be given other memory."""
        return list(map(shard, self._weights)) if self._is_sharded else self._weights

    def _laid_out(self, buffer: torch.Tensor) -> _Layout:
        strides = [weight.stride() for weight in self._shards()]
        if strides != self._strides:
            for pair in self.pairs:
                pair.follow_layout()
            self._strides = strides
        if self._layout is None or self._layout.buffer is not buffer or self._layout.strides != strides:
            masters, gradients = (
                buffer[begin : begin + self.numel].split_with_sizes(self._rooms) for begin in (0, self.numel)
            )
            bits = buffer[: self.numel].view(torch.int32)
            rooms = bits.split_with_sizes(self._rooms)
            parts = [room[:size] for room, size in zip(rooms, self._sizes, strict=True)]
            large = [long_words(room) for room in rooms[: self._large]]
            gaps = [room[size:] for room, size in zip(rooms, self._sizes, strict=True) if room.numel() > size]
            shaped = self._shaped(masters, strides)
            others = addresses_of(shaped), self._shaped(gradients, strides)
            del masters, gradients, rooms
            wide = [part.view(torch.float32) for part in parts]
            self._layout = _Layout(buffer, bits, large, parts, wide, gaps, shaped, *others, strides, holders=0)
        # Counted anew each time: other buckets have laid the buffer out for themselves since.
        self._layout.holders = storage_holders(buffer)
        return self._layout

    def _shaped(self, spaces: tuple[torch.Tensor, ...], strides: list[tuple[int, ...]]) -> list[torch.Tensor]:
        shapes = (weight.size() for weight in self._shards())
        return [space.as_strided(size, stride) for space, size, stride in zip(spaces, shapes, strides, strict=True)]

    def _flat_weights(self) -> list[torch.Tensor]:
        """The weights' memory; laid out anew only where some of it is elsewhere now."""
        shards = self._shards()
        addresses = [weight.data_ptr() for weight in shards]
        if addresses != self._addresses or not self._views:
            self._views = [flat(TENSOR_DETACH(weight)) for weight in shards]
            self._halves = [view.view(torch.int16) for view in self._views]
            large = self._views[: self._large]
            self._words = list(map(words, large)) if all(map(has_words, large)) else []
            self._addresses = addresses
        return self._views

    @torch.no_grad()
    def materialise(self, buffer: torch.Tensor) -> None:
        """Lay masters and gradients into ``buffer`` (float32, at least twice ``numel`` long)."""
        layout = self._laid_out(buffer)
        self._join(layout)
        arrived = list(map(_own_part, self._weights)) if self._is_sharded else grads_of(self._weights)
        gradients = _widened(layout.gradients, arrived)
        self._stage = _Stage.MATERIALISED
        self._show(layout.masters, gradients)

    @torch.no_grad()
    def give_gradients_back(self) -> None:
        """The weights' gradients become what the step has made of the masters'."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            left = master.grad
            TENSOR_GRAD.__set__(weight, None if left is None else left.to(weight.dtype))

    def _show(self, values: list[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Have the masters in the groups hold these, of this process's parts."""
        if not self._is_sharded:
            set_memory(self._masters, values)
            set_grads(self._masters, gradients)
            return
        for master, part, gradient in zip(self._masters, values, gradients, strict=True):
            in_place_of(master, part)
            TENSOR_GRAD.__set__(master, None if gradient is None else sharded_as(gradient, master))

    def _join(self, layout: _Layout) -> None:
        weights = self._flat_weights()
        first = self._choose_kernels()
        for parts in zip(self._words[:first], self._remainder_words, layout.long_words, strict=False):
            join_(*parts)
        if first < len(weights):
            torch._foreach_copy_(layout.wide[first:], weights[first:])
            if layout.gaps:
                torch._foreach_zero_(layout.gaps)
            add_remainder_(layout.bits[self._begin :], self.remainder[self._begin :])

    def _choose_kernels(self) -> int:
        """How many weights, from the first on, kernels put together and take apart, this time."""
        count = self._large if len(self._words) == self._large else 0
        numbers = sum(self._rooms[:count])
        self._by_kernel = count if count and are_ready(self.device, numbers) else 0
        self._begin = numbers if self._by_kernel else 0
        return self._by_kernel

    @torch.no_grad()
    def write_back(self) -> bool:
        """Take the stepped masters apart again; called again after a failure, it goes on where it was.

        Returns:
            Whether the buffer may be written to again.
        """
        layout = self._layout
        assert layout is not None, "materialise comes first"
        with InterruptsHeld():
            count = len(self._flat_weights())
            if self._stage is _Stage.MATERIALISED:
                self._gather(layout)
                first, begin = self._choose_kernels(), self._begin
                by_kernel = layout.long_words, self._words[:first], self._remainder_words, self._sums
                for parts in zip(*by_kernel, strict=False):
                    take_apart_(*parts)
                rest, remainder = slice(begin, None), self.remainder
                # In one line, so that nothing comes between the two.
                self._stage = _Stage.TAKEN_APART if take_remainder_(layout.bits[rest], remainder[rest]) else self._stage
            if self._stage is _Stage.TAKEN_APART:
                first, begin = self._by_kernel, self._begin
                if first < count:
                    torch._foreach_copy_(self._halves[first:], layout.parts[first:])
                    self._checksums[begin // BLOCK :].copy_(checksums(layout.bits[begin:]))
                self._stage = _Stage.AT_REST
        # Whose weights keep their gradients.
        self._show(self._placeholders, [None] * len(self.pairs))
        return layout.is_ours_alone()

    def _gather(self, layout: _Layout) -> None:
        """An optimizer may have given a master memory of its own, by ``p.data = ...``: what that holds counts."""
        values = list(map(shard, self._masters)) if self._is_sharded else self._masters
        if addresses_of(values) == layout.addresses:
            return
        for value, master, address in zip(values, layout.masters, layout.addresses, strict=True):
            # It is still the placeholder where an exception from outside came before the master was shown.
            if value.data_ptr() != address and not is_placeholder(shard(value)):
                master.copy_(shard(value))

    def forget_layout(self, unless_in: torch.Tensor | None) -> None:
        """Let go of a buffer, unless it is the one given."""
        if self._layout is not None and self._layout.buffer is not unless_in:
            self._layout = None


def _own_part(weight: torch.Tensor) -> torch.Tensor | None:
    """This process's part of a gradient, of the same numbers that its part of the weight is."""
    return None if weight.grad is None else shard(placed_as(weight.grad, weight))


def _widened(spaces: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients in float32: dense 16-bit ones in the space given."""
    lowered = [g is not None and is_lower_precision(g.dtype) and not g.is_sparse for g in gradients]
    into = [space for space, here in zip(spaces, lowered, strict=True) if here]
    if into:
        torch._foreach_copy_(into, [g for g, here in zip(gradients, lowered, strict=True) if g is not None and here])
    return [
        space if here else (None if gradient is None else as_float32(gradient))
        for space, gradient, here in zip(spaces, gradients, lowered, strict=True)
    ]


def large_first(pairs: Sequence[SplitPair]) -> list[SplitPair]:
    """Pairs in a bucket's order: those that kernels put together and take apart come before the others."""
    return sorted(pairs, key=lambda pair: not is_large(shard(pair.model_param)))


class Buffers:
    """The float32 memory that buckets are materialised in, one buffer a device."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._laid_out: weakref.WeakSet[Bucket] = weakref.WeakSet()

    def materialised(self, buckets: list[Bucket], gradients_too: bool = False) -> Iterator[None]:
        """Materialise one bucket after the other, and write each back before the next.

        Args:
            buckets: the buckets.
            gradients_too: write to the weights' gradients as well what a step leaves of them.
        """
        self._laid_out.update(buckets)
        try:
            for bucket in buckets:
                buffer = self._for(bucket)
                try:
                    bucket.materialise(buffer)
                    yield None
                    if gradients_too:
                        bucket.give_gradients_back()
                finally:
                    self._write_back(bucket)
        finally:
            kept = {device: buffer for device, buffer in self._buffers.items() if buffer.nbytes <= _KEPT_BYTES}
            self._buffers = kept
            # Also those of other calls: a few buckets at a time may be stepped, and hold on to a buffer that is gone.
            for bucket in self._laid_out:
                bucket.forget_layout(unless_in=kept.get(bucket.device))

    def _write_back(self, bucket: Bucket) -> None:
        try:
            alone = bucket.write_back()
        except BaseException:
            # Half of a master is the weight: an exception from outside must not part the two.
            bucket.write_back()
            raise
        if not alone:
            self._buffers.pop(bucket.device, None)

    def _for(self, bucket: Bucket) -> torch.Tensor:
        buffer = self._buffers.get(bucket.device)
        if buffer is None or buffer.numel() < 2 * bucket.numel:
            buffer = torch.empty(2 * bucket.numel, dtype=torch.float32, device=bucket.device)
            self._buffers[bucket.device] = buffer
        return buffer


def grouped(pairs: Sequence[AnyPair], bucket_bytes: int) -> list[list[AnyPair]]:
    """Pairs by device, in order, as many together as ``bucket_bytes`` of float32 allow for, at least one.

    A pair that several optimizers step is alone: each of them steps it with others of its own.
    """
    groups: list[list[AnyPair]] = []
    open_groups: dict[torch.device, list[AnyPair]] = {}
    room: dict[torch.device, int] = {}
    for pair in pairs:
        if len(pair.holders) > 1:
            groups.append([pair])
            continue
        device, size = pair.model_param.device, 8 * shard(pair.model_param).numel()
        if device not in open_groups or room[device] < size:
            open_groups[device] = []
            groups.append(open_groups[device])
            room[device] = bucket_bytes_at_most(device, bucket_bytes)
        open_groups[device].append(pair)
        room[device] -= size
    return groups
