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

# Bits of float32 numbers: of a magnitude, of infinity, of the usual nan; and half a unit in bfloat16's last place.
_MAGNITUDE: Final = 0x7FFFFFFF
_INF: Final = 0x7F800000
_NAN: Final = 0x7FC00000
_HALF: Final = 0x8000

# The upper half of a float32 number, rounded half away from zero, is a bfloat16 number. What is missing is the lower
# half as a signed integer, the remainder: where it is negative, the upper half was rounded up. All tensors are flat and
# of one size: weights bfloat16, remainders int16, values float32.


def split(values: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Write the weight and the remainder of float32 ``values``, which are used up: their memory is overwritten."""
    bits = values.view(torch.int32)
    remainder.copy_(bits)
    # The one nan that stays a nan: others, such as CUDA's, would be rounded to 0.
    values.nan_to_num_(math.nan, math.inf, -math.inf)
    weight.view(torch.int16).copy_(bits.add_(_HALF).bitwise_right_shift_(16))


def join(weight: torch.Tensor, remainder: torch.Tensor, values: torch.Tensor) -> None:
    """Write the float32 numbers of a weight and its remainder into ``values``.

    A number that was written to the weight gets the remainder of the one before, which is less than half a unit in its
    last place. 0, infinity and nan stay what they are. So no master is exact below 4.6e-41 or above 3.396e38.
    """
    values.copy_(weight)
    # All bits are set where the magnitude is above 0 and below that of inf: comparisons take several times as long.
    magnitude = weight.view(torch.int16).bitwise_and(0x7FFF)
    counts = magnitude - (_INF >> 16)
    counts.bitwise_and_(magnitude.neg_()).bitwise_right_shift_(15)
    values.view(torch.int32).add_(counts.bitwise_and_(remainder))


# The same for a compiler: in whole numbers of 32 bits, because for 16 bits, and for changes of type, compilers for CPUs
# make code that is several times slower. Two neighbours of 16 bits are one int32, and two of 32 bits one int64.


def split_pairs(values: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Do what :func:`split` does, on int64 of values, int32 of weights and int32 of remainders."""
    first, second = values.to(torch.int32), (values >> 32).to(torch.int32)
    remainder.copy_((first & 0xFFFF) | (second << 16))
    weight.copy_(((_rounded(first) >> 16) & 0xFFFF) | (_rounded(second) & -0x10000))


def join_pairs(weight: torch.Tensor, remainder: torch.Tensor, values: torch.Tensor) -> None:
    """Do what :func:`join` does, on int32 of weights, int32 of remainders and int64 of values."""
    first = _joined(weight << 16, (remainder << 16) >> 16)
    second = _joined(weight & -0x10000, remainder >> 16)
    values.copy_((second.to(torch.int64) << 32) | (first.to(torch.int64) & 0xFFFFFFFF))


def _rounded(bits: torch.Tensor) -> torch.Tensor:
    return torch.where((bits & _MAGNITUDE) > _INF, _NAN, bits) + _HALF


def _joined(bits: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    magnitude = bits & _MAGNITUDE
    return bits + torch.where((magnitude > 0) & (magnitude < _INF), remainder, 0)


def samples_of_split() -> list[Sample]:
    """List the functions of split masters for a compiler, with arguments of all kinds."""
    weight = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cpu")
    remainder = torch.bitwise_xor(weight * 31, 0x55)
    values = (weight.to(torch.int32) << 16 | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)
    halves, empty = weight.view(torch.bfloat16), torch.empty_like
    return [
        Sample(split, [values, empty(halves), empty(remainder)], written=[1, 2], pairs=split_pairs),
        Sample(join, [halves, remainder, empty(values)], written=[2], pairs=join_pairs),
    ]


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
