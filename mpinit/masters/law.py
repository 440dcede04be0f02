"""The law of masters: a master is its weight, and the bits that the rounding to 16 bits removed.

    meaning(weight, master) = where(round(master) == weight, master, weight)      element by element

The law is a pure function of two tensors. If an element of the weight was changed after its master was rounded into it,
the master becomes that number. An element that was not changed keeps the master's lower bits.
"""

import torch

from ..basics.dtypes import cast_within_range


def round_into(weight: torch.Tensor, values: torch.Tensor, clamps: bool) -> None:
    """Write float32 ``values`` to a 16-bit weight, in place; with ``clamps`` no finite number becomes infinite."""
    weight.copy_(cast_within_range(values, weight.dtype) if clamps else values)


def is_rounding(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor: which elements of a 16-bit weight equal the rounded ``values``."""
    rounded = values.to(weight.dtype)
    same = (rounded == weight) | (rounded.isnan() & weight.isnan())
    if weight.dtype == torch.float16:
        same |= cast_within_range(values, weight.dtype) == weight
    return same


def meaning(weight: torch.Tensor, values: torch.Tensor, earlier: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the new float32 values of a master by the law.

    Args:
        weight: the 16-bit weight.
        values: the master's present values, float32, of the weight's shape.
        earlier: the master's values before the last write to the weight. Elements that were restored since then get
            their lower bits from here. Default None.

    Returns:
        A new float32 tensor.
    """
    written = weight.float()
    if earlier is not None:
        written = torch.where(is_rounding(weight, earlier), earlier, written)
    return torch.where(is_rounding(weight, values), values, written)


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
