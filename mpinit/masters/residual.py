"""What a cast to 16 bits loses, kept apart: the original comes back bit for bit where the 16-bit value was not changed.

A float32 number and its 16-bit rounding differ, as bits read as integers, by an amount that nearly always fits into 16
bits: that is what is kept, in host memory. The few numbers for which it does not (ties, what is subnormal or out of
range in the narrower type, some nan) are kept as they are. Checksums of small blocks of the 16-bit values tell which of
them were changed since. Pure functions, the same for every tensor and device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from ..basics.dtypes import is_lower_precision
from ..torch_internals.devices import works_within_a_cache
from ..torch_internals.native_autocast import CastsOff

Cast = Callable[[torch.Tensor], torch.Tensor]

# Elements that share a checksum, and that take the present value together once one of them was changed.
BLOCK: Final = 64
# Elements worked on at a time: temporaries stay small, within a cache where that helps.
_CHUNK: Final = 1 << 16
# Elements of which the original itself is kept: a model's many small tensors are not worth a second look.
_SMALL: Final = 4 * BLOCK
# An element kept apart takes 4 bytes for its place and 4 for its value.
_APART: Final = 8


@dataclass(frozen=True)
class Residual:
    """What :func:`encode` keeps; all on the host.

    Attributes:
        checksums: int64, one for each block of 16-bit values; None where they are not going to change.
        differences: int16, for each element; None where ``values`` holds everything.
        places: int64, the elements kept as they are; None: every one.
    """

    length: int
    checksums: torch.Tensor | None
    differences: torch.Tensor | None
    places: torch.Tensor | None
    values: torch.Tensor


def encode(original: torch.Tensor, cast: Cast, *, may_change: bool = True) -> Residual | None:
    """What a cast is going to lose of ``original``, in one dimension; None where that is nothing.

    Without ``may_change`` the rounded values are what they are now when they are decoded.
    """
    with CastsOff():  # the caller may be inside an autocast block of his own, which casts what is joined
        if len(original) <= _SMALL and not may_change:
            return _whole(original, cast, may_change)
        if all(_same_bits(cast(part).to(original.dtype), part) for _, part in _chunks(original)):
            return None
        is_usual = original.dtype is torch.float32 and is_lower_precision(cast(original[:1]).dtype)
        if len(original) <= _SMALL or not is_usual:
            return _whole(original, cast, may_change)
        differences = torch.empty(len(original), dtype=torch.int16)
        places: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for start, part in _chunks(original):
            narrow = cast(part)
            if may_change:
                sums.append(_checksums(narrow))
            bits = narrow.float().view(torch.int32)
            # The difference of two 32-bit integers may wrap around; what is added to get back wraps around as well.
            torch.sub(part.view(torch.int32), bits, out=bits)
            fitting = differences[start : start + len(part)].copy_(bits)
            # 0 where the difference fits into 16 bits.
            apart = bits.add_(0x8000).bitwise_right_shift_(16).nonzero().flatten().cpu()
            fitting[apart] = 0
            places.append(apart + start)
        where = torch.cat(places)
        if _APART * len(where) > 2 * len(original):
            return _whole(original, cast, may_change)
        values = original[where.to(original.device)].cpu()
        return Residual(len(original), torch.cat(sums) if sums else None, differences, where, values)


def decode(residual: Residual, present: torch.Tensor) -> torch.Tensor:
    """The original's values, in its dtype, wherever the 16-bit values still are what the original was cast to.

    Blocks of which an element was changed hold their present values.
    """
    restored = present.to(residual.values.dtype)
    with CastsOff():
        for start, part in _chunks(present):
            stop = start + len(part)
            unchanged = _unchanged(residual, part, start)
            if residual.differences is not None:
                kept = residual.differences[start:stop] * unchanged
                restored[start:stop].view(torch.int32).add_(kept.to(present.device))
            if residual.places is None:
                wide = residual.values[start:stop].to(present.device)
                torch.where(unchanged.to(present.device), wide, restored[start:stop], out=restored[start:stop])
            else:
                first, last = torch.searchsorted(residual.places, torch.tensor([start, stop])).tolist()
                places, values = residual.places[first:last], residual.values[first:last]
                here = unchanged[places - start]
                restored[places[here].to(present.device)] = values[here].to(present.device)
    return restored


def unchanged_or_present(original: torch.Tensor, narrow: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Where the original itself was kept: its numbers wherever ``present`` still has the bits of its cast, ``narrow``.

    ``original`` itself where nothing was changed.
    """
    bits = torch.int16 if narrow.element_size() == 2 else torch.int32
    changed = narrow.view(bits) != present.view(bits)
    return torch.where(changed, present.to(original.dtype), original) if changed.any() else original


def _unchanged(residual: Residual, part: torch.Tensor, start: int) -> torch.Tensor:
    """For each element from ``start`` on whether its block is as it was, on the host."""
    if residual.checksums is None:
        return torch.ones(len(part), dtype=torch.bool)
    now = _checksums(part)
    blocks = now == residual.checksums[start // BLOCK : start // BLOCK + len(now)]
    return blocks.repeat_interleave(BLOCK)[: len(part)]


def _whole(original: torch.Tensor, cast: Cast, may_change: bool) -> Residual:
    sums = torch.cat([_checksums(cast(part)) for _, part in _chunks(original)]) if may_change else None
    return Residual(len(original), sums, None, None, original.to("cpu", copy=True))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.view(bits), other.view(bits))


def _chunks(values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of whole blocks, at most a quarter of what there is, so that temporaries stay below it."""
    largest = _CHUNK if works_within_a_cache(values.device) else 64 * _CHUNK
    step = min(largest, max(BLOCK, len(values) // 4 // BLOCK * BLOCK))
    for start in range(0, len(values), step):
        yield start, values[start : start + step]


def _checksums(values: torch.Tensor) -> torch.Tensor:
    """For each block a sum of its bits, each 32 of them times a number of their own, as 64-bit integers wrap around.

    A block of which one element changed has another checksum; of several, nearly certainly (1 in 2**33).
    """
    block = BLOCK * values.element_size() // 4
    missing = -len(values) % BLOCK
    if missing or values.storage_offset() % 2:
        values = torch.cat([values, values.new_zeros(missing)])
    words = values.view(torch.int32).to(torch.int64).view(-1, block)
    return (words * _WEIGHTS[:block].to(values.device)).sum(1).cpu()


# Odd numbers all over the 64 bits, the same in every process.
_RANDOM: Final = torch.Generator().manual_seed(0x6D70696E)
_WEIGHTS: Final = torch.randint(-(2**63), 2**63 - 1, (2 * BLOCK,), generator=_RANDOM, dtype=torch.int64) | 1
