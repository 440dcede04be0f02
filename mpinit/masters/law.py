"""The law of masters: a master is a pure function of two tensors, with no history.

    full:  where(round(master) == weight, master, weight)    element by element, where nan equals nan
    split: the weight, and a 16-bit remainder below it; the remainder of 0, infinity and nan is ignored

So an element of a weight that was written to becomes its master, and one that was not keeps its master's lower bits:
also one that was written to and then restored.
"""

import math

import torch

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

# The upper half of a float32 number, rounded half away from zero, is a bfloat16 number. What is missing is the lower
# half as a signed integer, the remainder: where it is negative, the upper half was rounded up.


def split_(bits: torch.Tensor, remainder: torch.Tensor) -> None:
    """Split float32 numbers in place: ``bits`` become those of the bfloat16 numbers.

    Args:
        bits: the numbers, viewed as int32.
        remainder: int16, of the same shape; gets the remainders.
    """
    # The one nan that stays a nan: others, such as CUDA's, would be rounded to 0.
    bits.view(torch.float32).nan_to_num_(math.nan, math.inf, -math.inf)
    remainder.copy_(bits)
    bits.add_(0x8000).bitwise_right_shift_(16)


def join_(values: torch.Tensor, remainder: torch.Tensor) -> None:
    """Add remainders to bfloat16 numbers that were widened to float32, in place: the reverse of :func:`split_`.

    A number that was written to the weight gets the remainder of the one before, which is less than half a unit in its
    last place. 0, infinity and nan stay what they are. So no master is exact below 4.6e-41 or above 3.396e38.

    Args:
        values: float32.
        remainder: int16, of the same shape.
    """
    counts = values != 0
    # Not isfinite(), which takes a float32 temporary. A nan is in neither.
    counts &= values > -math.inf
    counts &= values < math.inf
    values.view(torch.int32).add_(remainder.where(counts, 0))


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
