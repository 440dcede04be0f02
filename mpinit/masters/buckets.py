"""Buckets of split masters: as many weights as are materialised in float32 at a time, and the memory for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from sys import getrefcount
from typing import Final

import torch

from ..basics.dtypes import is_lower_precision
from ..basics.gradients import as_float32
from ..torch_internals.data_watching import TENSOR_DATA
from .float_split import add_remainder_, flat, take_remainder_
from .full import Pair

# On a CPU, memory past this size goes back to the system after every step and is faulted in again by the next:
# buckets of 16 MiB were measured to step twice as fast as ones of 64.
_CPU_BUCKET_BYTES: Final = 16 * 2**20
# A buffer up to this size stays from step to step, laid out: for small weights that takes longer than the step.
_KEPT_BYTES: Final = 4 * 2**20
_HELD_ONCE: Final = next(map(getrefcount, [torch.empty(0)]))


@dataclass
class _Layout:
    """A buffer as one bucket sees it: first its masters, then their gradients."""

    buffer: torch.Tensor
    bits: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    masters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    strides: list[tuple[int, ...]]
    holders: int

    def is_ours_alone(self) -> bool:
        """Whether nobody, a custom optimizer's state say, holds on to a gradient or master that lies in the buffer."""
        held = max(map(getrefcount, self.gradients)), max(map(getrefcount, self.masters))
        return held == (_HELD_ONCE, _HELD_ONCE) and _storage_holders(self.buffer) == self.holders


def _storage_holders(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


class Bucket:
    """Pairs on one device that are materialised together; their remainders lie in one tensor."""

    def __init__(self, pairs: list[Pair], remainders: list[torch.Tensor]) -> None:
        self.pairs = pairs
        self.sizes = [pair.model_param.numel() for pair in pairs]
        self.remainder = torch.cat(remainders)
        self.device = self.remainder.device
        self._placeholders = [placeholder(pair.model_param) for pair in pairs]
        self._layout: _Layout | None = None
        self._weights: list[torch.Tensor] = []

    @property
    def numel(self) -> int:
        """Elements of all its weights."""
        return self.remainder.numel()

    def _laid_out(self, buffer: torch.Tensor) -> _Layout:
        strides = [pair.model_param.stride() for pair in self.pairs]
        if self._layout is None or self._layout.buffer is not buffer or self._layout.strides != strides:
            masters, gradients = (
                buffer[start : start + self.numel].split_with_sizes(self.sizes) for start in (0, self.numel)
            )
            bits = buffer[: self.numel].view(torch.int32)
            parts = bits.split_with_sizes(self.sizes)
            shaped = self._shaped(masters, strides), self._shaped(gradients, strides)
            del masters, gradients
            self._layout = _Layout(buffer, bits, parts, *shaped, strides, holders=0)
            self._layout.holders = _storage_holders(buffer)
        return self._layout

    def _shaped(self, spaces: tuple[torch.Tensor, ...], strides: list[tuple[int, ...]]) -> list[torch.Tensor]:
        shapes = (pair.model_param.size() for pair in self.pairs)
        return [space.as_strided(size, stride) for space, size, stride in zip(spaces, shapes, strides, strict=True)]

    @torch.no_grad()
    def materialise(self, buffer: torch.Tensor) -> None:
        """Lay masters and gradients into ``buffer`` (float32, at least twice ``numel`` long)."""
        layout = self._laid_out(buffer)
        self._weights = [flat(pair.model_param.detach()).view(torch.int16) for pair in self.pairs]
        torch._foreach_copy_(layout.parts, self._weights)
        add_remainder_(layout.bits, self.remainder)
        gradients = _widened(layout.gradients, [pair.model_param.grad for pair in self.pairs])
        for pair, master, gradient in zip(self.pairs, layout.masters, gradients, strict=True):
            TENSOR_DATA.__set__(pair.master_param, master)
            pair.master_param.grad = gradient

    @torch.no_grad()
    def write_back(self) -> bool:
        """Take the stepped masters apart again; returns whether the buffer may be written to again."""
        layout = self._layout
        assert layout is not None, "materialise comes first"
        take_remainder_(layout.bits, self.remainder)
        torch._foreach_copy_(self._weights, layout.parts)
        self._weights = []
        for pair, placeholder in zip(self.pairs, self._placeholders, strict=True):
            pair.master_param.grad = None
            TENSOR_DATA.__set__(pair.master_param, placeholder)
        return layout.is_ours_alone()

    def forget_layout(self, unless_in: torch.Tensor | None) -> None:
        """Let go of a buffer, unless it is the one given."""
        if self._layout is not None and self._layout.buffer is not unless_in:
            self._layout = None


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


class Buffers:
    """The float32 memory that buckets are materialised in, one buffer a device."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, torch.Tensor] = {}

    def materialised(self, buckets: list[Bucket]) -> Iterator[None]:
        """Materialise one bucket after the other, and write each back before the next."""
        try:
            for bucket in buckets:
                bucket.materialise(self._for(bucket))
                try:
                    yield None
                finally:
                    if not bucket.write_back():
                        del self._buffers[bucket.device]
        finally:
            kept = {device: buffer for device, buffer in self._buffers.items() if buffer.nbytes <= _KEPT_BYTES}
            self._buffers = kept
            for bucket in buckets:
                bucket.forget_layout(unless_in=kept.get(bucket.device))

    def _for(self, bucket: Bucket) -> torch.Tensor:
        buffer = self._buffers.get(bucket.device)
        if buffer is None or buffer.numel() < 2 * bucket.numel:
            buffer = torch.empty(2 * bucket.numel, dtype=torch.float32, device=bucket.device)
            self._buffers[bucket.device] = buffer
        return buffer


def grouped(pairs: list[Pair], bucket_bytes: int) -> list[list[Pair]]:
    """Pairs by device, in order, as many together as ``bucket_bytes`` of float32 allow for, at least one."""
    groups: list[list[Pair]] = []
    open_groups: dict[torch.device, list[Pair]] = {}
    room: dict[torch.device, int] = {}
    for pair in pairs:
        device, size = pair.model_param.device, 8 * pair.model_param.numel()
        if device not in open_groups or room[device] < size:
            open_groups[device] = []
            groups.append(open_groups[device])
            room[device] = min(bucket_bytes, _CPU_BUCKET_BYTES if device.type == "cpu" else bucket_bytes)
        open_groups[device].append(pair)
        room[device] -= size
    return groups


def placeholder(weight: torch.Tensor) -> torch.Tensor:
    """What stands for a master between steps: its shape and dtype, and no memory."""
    return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)
