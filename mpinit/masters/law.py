"""The law of masters: a master is its weight, and the bits beyond it.

    meaning(weight, master) = where(round(master) == weight, master, weight)      element by element

A pure function of two tensors. An element that was written to a weight since its master was rounded into it counts;
an element that was not written, or that was written with the value it had, keeps its low bits.
"""

import torch

from ..basics.dtypes import cast_within_range


def round_into(weight: torch.Tensor, values: torch.Tensor, clamps: bool) -> None:
    """Write float32 ``values`` to a 16-bit weight, in place; with ``clamps`` no finite number becomes infinite."""
    weight.copy_(cast_within_range(values, weight.dtype) if clamps else values)


def is_rounding(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Compare element by element whether a 16-bit weight is the rounding of ``values``: a bool tensor of its shape."""
    rounded = values.to(weight.dtype)
    same = (rounded == weight) | (rounded.isnan() & weight.isnan())
    if weight.dtype == torch.float16:
        same |= cast_within_range(values, weight.dtype) == weight
    return same


def meaning(weight: torch.Tensor, values: torch.Tensor, earlier: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the float32 numbers that a 16-bit weight and its master's ``values`` stand for.

    Args:
        weight: the 16-bit weight.
        values: its master's numbers, float32, of the weight's shape.
        earlier: what the master held before ``values`` were made from a written weight. Elements that were put back
            since get their low bits from here. Default none.

    Returns:
        A new float32 tensor.
    """
    written = weight.float()
    if earlier is not None:
        written = torch.where(is_rounding(weight, earlier), earlier, written)
    return torch.where(is_rounding(weight, values), values, written)


def restore_unchanged(original: torch.Tensor, narrow: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Apply the law to a kept original: its numbers wherever ``present`` has the bits of its cast, ``narrow``.

    ``original`` itself where nothing was changed.
    """
    bits = torch.int16 if narrow.element_size() == 2 else torch.int32
    changed = narrow.view(bits) != present.view(bits)
    return torch.where(changed, present.to(original.dtype), original) if changed.any() else original
