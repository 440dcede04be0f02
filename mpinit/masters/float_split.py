"""A float32 number as a bfloat16 one and a 16-bit remainder, exact to the bit.

A float32 number's upper half, rounded half away from zero, is a bfloat16 number. What is missing is the lower half
read as a signed integer: where it is negative, the upper half was rounded up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from ..torch_internals.devices import works_within_a_cache

_HALF = 0x8000
_LOWER = 0 if sys.byteorder == "little" else 1
# Elements worked on at a time where several passes over them then stay in a cache.
_CHUNK = 1 << 17


def split_(values: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Take float32 ``values`` apart into a bfloat16 weight and an int16 remainder.

    Args:
        values: float32, one-dimensional, contiguous.
        weight: bfloat16, the same length, written to.
        remainder: int16, the same length, written to.

    Example:
        >>> values = torch.tensor([1.0 / 3.0])
        >>> weight, rest = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int16)
        >>> split_(values, weight, rest)
        >>> bool(join(weight, rest) == values)
        True
    """
    halves = values.view(torch.int16)
    lower, upper = halves[_LOWER::2], halves[1 - _LOWER :: 2]
    # In the memory written to anyway: -1 where the upper half is rounded up, because the lower one is 0x8000 or more.
    torch.bitwise_right_shift(lower, 15, out=remainder)
    torch.sub(upper, remainder, out=weight.view(torch.int16))
    remainder.copy_(lower)


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Put together, in a new float32 tensor, what :func:`split_` took apart."""
    values = weight.view(torch.bfloat16).to(torch.float32)
    add_remainder_(values.view(torch.int32), remainder)
    return values


def take_remainder_(bits: torch.Tensor, remainder: torch.Tensor) -> bool:
    """Turn float32 bits into those of the rounded upper half; ``remainder`` gets the lower half as a signed number.

    Returns:
        True: it is done, and must not be done again.
    """
    for part, rest in _chunks(bits, remainder):
        rest.copy_(part)
        part.add_(_HALF).bitwise_right_shift_(16)
    return True


def add_remainder_(bits: torch.Tensor, remainder: torch.Tensor) -> None:
    """The reverse of :func:`take_remainder_`, of float32 bits whose lower half is 0: of a bfloat16 number widened."""
    for part, rest in _chunks(bits, remainder):
        part.add_(rest)


def _chunks(bits: torch.Tensor, remainder: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if bits.numel() <= _CHUNK or not works_within_a_cache(bits.device):
        return iter(((bits, remainder),))
    return zip(bits.unsafe_split(_CHUNK), remainder.unsafe_split(_CHUNK), strict=True)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as one dimension, whatever the order of its own."""
    return tensor.as_strided((tensor.numel(),), (1,))
