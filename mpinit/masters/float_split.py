"""A float32 number as a bfloat16 one and a 16-bit remainder, exact to the bit.

A float32 number's upper half, rounded half away from zero, is a bfloat16 number. What is missing is the lower half
read as a signed integer: where it is negative, the upper half was rounded up.
"""

import math
from collections.abc import Iterator
from typing import Final

import torch

from ..torch_internals.running import is_faster_in_chunks, reads_without_sync

_HALF: Final = 0x8000
_MAGNITUDE: Final = 0x7FFFFFFF
_INFINITE: Final = 0x7F800000
# Elements worked on at a time where several passes over them then stay in a cache.
_CHUNK: Final = 1 << 17


def split_off_remainder_(bits: torch.Tensor, remainder: torch.Tensor) -> None:
    """Turn float32 bits, int32 in one dimension, into those of the rounded upper half, a bfloat16 number's.

    ``remainder``, int16, gets the lower half as a signed number.
    """
    for part, rest in _chunks(bits, remainder):
        # The one nan with whose bits this can be done: others, such as CUDA's, would be rounded to 0.
        part.view(torch.float32).nan_to_num_(math.nan, math.inf, -math.inf)
        rest.copy_(part)
        part.add_(_HALF).bitwise_right_shift_(16)


def add_remainder_(values: torch.Tensor, remainder: torch.Tensor) -> None:
    """Add remainders to bfloat16 numbers widened to float32, in place: the reverse of :func:`split_off_remainder_`.

    A number that was written to the weight gets the remainder of the number before, less than half a unit in the last
    place. Only with a written 0 or infinity the sum may be nan: there the weight alone counts.

    Args:
        values: float32, in one dimension.
        remainder: int16, of the same size.
    """
    parts = _chunks(values, remainder) if values.numel() > _CHUNK else ((values, remainder),)
    for part, rest in parts:
        bits = part.view(torch.int32)
        if reads_without_sync(part.device):
            bits.add_(rest)
            # A weight and a remainder of different numbers may be nan. A sum costs less than testing each element.
            if bool(part.sum().isfinite()):
                continue
            bits.sub_(rest)
        magnitude, wide = bits.bitwise_and(_MAGNITUDE), rest.to(torch.int32)
        wide = torch.where(magnitude == 0, wide.clamp(min=0), wide)
        bits.add_(torch.where(magnitude == _INFINITE, wide.clamp(max=0), wide))


def _chunks(values: torch.Tensor, remainder: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if values.numel() <= _CHUNK or not is_faster_in_chunks(values.device):
        return iter(((values, remainder),))
    return zip(values.unsafe_split(_CHUNK), remainder.unsafe_split(_CHUNK), strict=True)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps, in any order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor's memory as one dimension, in the order of the memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
