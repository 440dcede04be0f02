"""Finding the 16-bit tensor of a model that another tensor is a view of, and the same view of its float32 values."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..basics.dtypes import is_lower_precision
from ..distributed.sharding import local

Values = Callable[[torch.Tensor], torch.Tensor | None]


def named_own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters and buffers."""
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def is_16_bit(value: Any) -> bool:
    """Whether ``value`` is a float16 or bfloat16 tensor."""
    return isinstance(value, torch.Tensor) and is_lower_precision(value.dtype)


def storage_of(tensor: torch.Tensor) -> int:
    """Which memory a tensor is in; 0 where it has none that could be shared."""
    part = local(tensor)
    return part.untyped_storage().data_ptr() if part.layout is torch.strided and not part.is_meta else 0


def same_view(view: torch.Tensor, owner: torch.Tensor, values_of: Values) -> torch.Tensor:
    """``view``, a 16-bit view of ``owner``, in float32: of the values that stand for ``owner``, where there are any."""
    values = values_of(owner)
    if values is None:
        return view.float()
    values = values.float()
    if view.shape == owner.shape and view.stride() == owner.stride():
        return values
    if values.stride() != owner.stride() or values.layout is not torch.strided:
        return view.float()
    offset = view.storage_offset() - owner.storage_offset() + values.storage_offset()
    return values.as_strided(view.size(), view.stride(), offset)
