"""Finding the 16-bit tensor of a model that another tensor is a view of, and the same view of its float32 values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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


def owners_of_memory(modules: Iterable[nn.Module]) -> dict[int, torch.Tensor]:
    """Memory -> the 16-bit parameter or buffer that is in it."""
    tensors = (tensor for module in modules for _, tensor in named_own_tensors(module) if is_16_bit(tensor))
    return {storage_of(tensor): tensor for tensor in tensors}


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


class Aliases:
    """The 16-bit tensors of some modules, found by any view of them.

    Args:
        modules: where they are, as they are when asked.
        values_of: tensor -> the float32 values that stand for it, or None.
    """

    def __init__(self, modules: Iterable[nn.Module], values_of: Values) -> None:
        self._modules = modules
        self._values_of = values_of
        self._owners: dict[int, torch.Tensor] = {}
        self._misses_left = 0

    def float32_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The float32 values of a 16-bit tensor that is one of them, or a view of one; None where it is neither."""
        memory = storage_of(tensor)
        owner = self._owners.get(memory)
        if owner is None or storage_of(owner) != memory:
            # Weights move (``.to(device)``): look again, but not for each of many tensors that are nobody's.
            if self._misses_left > 0 and owner is None:
                self._misses_left -= 1
                return None
            self._owners = owners_of_memory(list(self._modules))
            self._misses_left = len(self._owners)
            owner = self._owners.get(memory)
        if owner is None or not memory:
            return None
        return same_view(tensor.detach(), owner, self._values_of)
