"""What a cast to 16 bits loses, kept apart: the original comes back bit for bit where nobody changed the 16-bit value.

A float32 number and its 16-bit rounding differ, as bits read as integers, by an amount that nearly always fits into 16
bits: that is what is kept, in host memory. The few numbers for which it does not (ties, what is subnormal or out of
range in the narrower type, some nan) are kept as they are. Checksums of small blocks of the 16-bit values tell which of
them were changed since. Pure functions, the same for every tensor and device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from ..basics.dtypes import is_lower_precision

# Elements that share a checksum, and that take the present value together once one of them was changed.
BLOCK: Final = 64
# Elements worked on at a time: temporaries stay small, on a CPU within its cache.
_CHUNK: Final = 1 << 16
# An element kept apart takes 4 bytes for its place and 4 for its value.
_APART: Final = 8


@dataclass(frozen=True)
class Residual:
    """What :func:`encode` keeps; all on the host.

    Attributes:
        length: how many elements there are.
        checksums: int64, one for each block of 16-bit values.
        differences: int16, for each element; None where ``values`` holds everything.
        places: int64, the elements kept as they are; None: every one.
        values: those, in the original's dtype.
    """

    length: int
    checksums: torch.Tensor
    differences: torch.Tensor | None
    places: torch.Tensor | None
    values: torch.Tensor


def encode(original: torch.Tensor, cast: torch.Tensor) -> Residual | None:
    """What ``cast`` lost of ``original``.

    Args:
        original: floating, one-dimensional.
        cast: its rounding in another floating type, the same length, on the same device.

    Returns:
        What is needed for :func:`decode`; None where nothing was lost.

    Example:
        >>> original = torch.tensor([1 / 3, 1e-30, -1e9])
        >>> cast = original.half()
        >>> residual = encode(original, cast)
        >>> bool((decode(residual, cast) == original).all())
        True
        >>> encode(torch.tensor([0.5]), torch.tensor([0.5]).half()) is None
        True
    """
    if all(_same_bits(narrow.to(original.dtype), wide) for _, wide, narrow in _chunks(original, cast)):
        return None
    if original.dtype is not torch.float32 or not is_lower_precision(cast.dtype):
        return _whole(original, cast)
    differences, places = [], []
    for start, wide, narrow in _chunks(original, cast):
        # The difference of two 32-bit integers may wrap around; what is added to get back wraps around as well.
        difference = wide.view(torch.int32) - narrow.float().view(torch.int32)
        fitting = difference.to(torch.int16)
        # 0 where the difference fits into 16 bits.
        beyond = difference.add_(0x8000).bitwise_right_shift_(16)
        apart = beyond.nonzero().flatten()
        fitting[apart] = 0
        differences.append(fitting.cpu())
        places.append(apart.cpu() + start)
    where = torch.cat(places)
    if _APART * len(where) > 2 * len(original):
        return _whole(original, cast)
    values = original[where.to(original.device)].cpu()
    return Residual(len(original), _checksums(cast), torch.cat(differences), where, values)


def decode(residual: Residual, present: torch.Tensor) -> torch.Tensor:
    """The original's values, in its dtype, wherever the 16-bit values still are what the original was cast to.

    Args:
        residual: from :func:`encode`.
        present: the 16-bit values as they are now, one-dimensional.

    Returns:
        A new tensor on ``present``'s device; blocks of which an element was changed hold their present values.
    """
    unchanged = _checksums(present) == residual.checksums
    dtype = residual.values.dtype
    restored = present.to(dtype)
    if residual.differences is not None:
        bits = restored.view(torch.int32)
        kept = residual.differences * unchanged.repeat_interleave(BLOCK)[: len(present)]
        for start in range(0, len(present), _CHUNK):
            bits[start : start + _CHUNK] += kept[start : start + _CHUNK].to(bits.device)
    if residual.places is None:
        here = unchanged.repeat_interleave(BLOCK)[: len(present)].to(present.device)
        return torch.where(here, residual.values.to(present.device), restored)
    here = unchanged[residual.places // BLOCK]
    restored[residual.places[here].to(present.device)] = residual.values[here].to(present.device)
    return restored


def _whole(original: torch.Tensor, cast: torch.Tensor) -> Residual:
    return Residual(len(original), _checksums(cast), None, None, original.to("cpu", copy=True))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.view(bits), other.view(bits))


def _chunks(original: torch.Tensor, cast: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    step = _chunk_of(original)
    for start in range(0, len(original), step):
        yield start, original[start : start + step], cast[start : start + step]


def _chunk_of(tensor: torch.Tensor) -> int:
    return _CHUNK if tensor.device.type == "cpu" else 64 * _CHUNK


def _checksums(values: torch.Tensor) -> torch.Tensor:
    """For each block a sum of its bits, each 32 of them times a number of their own, as 64-bit integers wrap around.

    A block of which one element changed has another checksum; of several, nearly certainly (1 in 2**33).
    """
    block = BLOCK * values.element_size() // 4
    missing = -len(values) % BLOCK
    if missing or values.storage_offset() % 2:
        values = torch.cat([values, values.new_zeros(missing)])
    words = values.view(torch.int32)
    weights = _WEIGHTS[:block].to(values.device)
    step = _chunk_of(values)
    sums = [
        (words[start : start + step].to(torch.int64).view(-1, block) * weights).sum(1).cpu()
        for start in range(0, len(words), step)
    ]
    return torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64)


def _make_weights() -> torch.Tensor:
    """Odd numbers all over the 64 bits, the same in every process."""
    random = torch.Generator().manual_seed(0x6D70696E)
    return torch.randint(-(2**63), 2**63 - 1, (2 * BLOCK,), generator=random, dtype=torch.int64) | 1


_WEIGHTS: Final = _make_weights()
