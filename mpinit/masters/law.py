"""The law of masters: a master is its weight, and the bits beyond it.

    meaning(weight, master) = where(round(master) == weight, master, weight)      element by element

A pure function of two tensors. What was written to a weight since its master was rounded into it counts; elements that
were not written, or written with the value they had, keep their low bits. Values put into a weight for an evaluation
and taken out again cost none.
"""

import torch

from ..basics.dtypes import cast_within_range
from ..torch_internals.running import is_read_freely


def round_into(weight: torch.Tensor, values: torch.Tensor, clamps: bool) -> None:
    """Write float32 ``values`` to a 16-bit weight, in place; ``clamps``: none that is finite becomes infinite."""
    weight.copy_(cast_within_range(values, weight.dtype) if clamps else values)


def is_rounding(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """For each element, whether a 16-bit weight is the rounding of ``values``: a bool tensor of its shape."""
    rounded = values.to(weight.dtype)
    same = (rounded == weight) | (rounded.isnan() & weight.isnan())
    if weight.dtype == torch.float16:
        same |= cast_within_range(values, weight.dtype) == weight
    return same


def follow_weight(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Make float32 ``values`` the meaning of the two, in place."""
    # As nearly always.
    if not (is_read_freely(weight.device) and torch.equal(values.to(weight.dtype), weight)):
        values.copy_(torch.where(is_rounding(weight, values), values, weight.float()))


def unchanged_or_present(original: torch.Tensor, narrow: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """The law where an original is kept: its numbers wherever ``present`` has the bits of its cast, ``narrow``.

    ``original`` itself where nothing was changed.
    """
    bits = torch.int16 if narrow.element_size() == 2 else torch.int32
    changed = narrow.view(bits) != present.view(bits)
    return torch.where(changed, present.to(original.dtype), original) if changed.any() else original
