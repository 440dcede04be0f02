"""The law of masters: a master is a pure function of two tensors, with no history.

    full:  where(round(master) == weight, master, weight)    element by element, where nan equals nan
    split: the weight, and a 16-bit remainder below it; the remainder of 0, infinity and nan is ignored

So an element of a weight that was written to becomes its master, and one that was not keeps its master's lower bits:
also one that was written to and then restored.
"""

import math
from typing import Final

import torch

from .arithmetic import Sample

# -- full masters -----------------------------------------------------------------------------------------------------


def is_rounding(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor: which elements of a 16-bit weight equal the rounded ``values``."""
    rounded = values.to(weight.dtype)
    return (rounded == weight) | (rounded.isnan() & weight.isnan())


def meaning(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Compute the float32 values of a full master by the law.

    Args:
        weight: the 16-bit weight.
        values: the master's present values, float32, of the weight's shape.

    Returns:
        A new float32 tensor.
    """
    return torch.where(is_rounding(weight, values), values, weight.float())


# -- split masters ----------------------------------------------------------------------------------------------------

# The bits of infinity in bfloat16.
_INF: Final = 0x7F80

# The upper half of a float32 number, rounded half away from zero, is a bfloat16 number. What is missing is the lower
# half as a signed integer, the remainder: where it is negative, the upper half was rounded up. Both functions are for
# flat tensors of one size, and may be compiled.


def round_half_away(bits: torch.Tensor) -> None:
    """Round float32 numbers, viewed as int32, to bfloat16 ones in place. Before, their lower half is the remainder."""
    # The one nan that stays a nan: others, such as CUDA's, would be rounded to 0.
    bits.view(torch.float32).nan_to_num_(math.nan, math.inf, -math.inf)
    bits.add_(0x8000).bitwise_and_(-0x10000)


def join(weight: torch.Tensor, remainder: torch.Tensor, values: torch.Tensor) -> None:
    """Write the float32 numbers of a weight and its remainder into ``values``.

    A number that was written to the weight gets the remainder of the one before, which is less than half a unit in its
    last place. 0, infinity and nan stay what they are. So no master is exact below 4.6e-41 or above 3.396e38.

    Args:
        weight: bfloat16.
        remainder: int16.
        values: float32.
    """
    values.copy_(weight)
    # All bits are set where the magnitude is above 0 and below that of inf: comparisons take several times as long.
    magnitude = weight.view(torch.int16).bitwise_and(0x7FFF)
    counts = magnitude - _INF
    counts.bitwise_and_(magnitude.neg_()).bitwise_right_shift_(15)
    values.view(torch.int32).add_(counts.bitwise_and_(remainder))


def samples_of_split() -> list[Sample]:
    """List the functions of split masters, with arguments of all kinds, and which of these each writes to."""
    weight = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cpu")
    remainder = torch.bitwise_xor(weight * 31, 0x55)
    bits = weight.to(torch.int32) << 16 | (remainder.to(torch.int32) & 0xFFFF)
    halves = weight.view(torch.bfloat16)
    values = torch.empty(len(bits), dtype=torch.float32, device="cpu")
    return [(round_half_away, [bits], [0]), (join, [halves, remainder, values], [2])]


# -- casts without masters --------------------------------------------------------------------------------------------


def restore_unchanged(original: torch.Tensor, narrow: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Return ``original`` with those elements of ``present`` that differ from the cast of the original.

    Args:
        original: the values before a cast.
        narrow: the result of the cast.
        present: the present values, in the dtype of the cast.

    Returns:
        ``original`` itself if no element was changed.
    """
    bits = torch.int16 if narrow.element_size() == 2 else torch.int32
    changed = narrow.view(bits) != present.view(bits)
    return torch.where(changed, present.to(original.dtype), original) if changed.any() else original
