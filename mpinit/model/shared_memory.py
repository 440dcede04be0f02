"""Memory that a parameter or buffer shares with other tensors; a cast would silently separate them."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from ..basics.dtypes import is_lower_precision
from ..basics.modules import ModelIndex
from ..distributed.sharding import local


def check_memory(index: ModelIndex, targets: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Refuse to cast tensors that share memory with others, and parameters, or their gradients, in larger memory.

    Weights of RNNs lie in one tensor, which is made anew after the cast. Buffers that are different parts of one memory
    are cast: a write to the one changes no number of the other.
    """
    gathered = {id(w) for module in index.names if isinstance(module, nn.RNNBase) for w in module.parameters()}
    cast = {id(tensor) for tensor, dtype in targets.items() if tensor.dtype != dtype}
    tensors: dict[int, tuple[torch.Tensor, bool]] = {id(each): (each, False) for _, each in index.parameters}
    tensors |= {id(buffer): (buffer, True) for _, buffer in index.buffers if buffer.is_floating_point()}
    seen: dict[int, list[torch.Tensor]] = {}
    # Without calls for each tensor: models have thousands.
    for key, (tensor, is_buffer) in tensors.items():
        if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            continue
        memory, count = tensor.untyped_storage(), tensor.numel()
        others = seen.setdefault(memory.data_ptr(), []) if count else []
        for other in others if key not in gathered else ():
            if (key in cast or id(other) in cast) and (not is_buffer or _overlap(tensor, other)):
                names = _name_of(tensor, index), _name_of(other, index)
                way = _VIEW.format(*names) if is_buffer else _TIE
                raise ValueError(_SHARED.format(names[0], f"shares memory with {names[1]!r}", way))
        others.append(tensor)
        if key not in cast or is_buffer or key in gathered:
            continue
        gradient = tensor.grad
        if memory.nbytes() > count * tensor.element_size():
            raise ValueError(_SHARED.format(_name_of(tensor, index), "is a part of larger memory", _PART))
        if gradient is not None and _is_part(gradient):
            fault = "has a gradient that is a part of larger memory", _GRADIENT
            raise ValueError(_SHARED.format(_name_of(tensor, index), *fault))


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors in one storage have a number in common."""
    used = torch.zeros(first.untyped_storage().nbytes() // first.element_size(), dtype=torch.bool, device="cpu")
    if first.dtype != second.dtype:
        return True
    first_used, second_used = (used.as_strided(t.size(), t.stride(), t.storage_offset()) for t in (first, second))
    first_used.fill_(True)
    return bool(second_used.any())


def _name_of(tensor: torch.Tensor, index: ModelIndex) -> str:
    return next(name for name, own in (*index.parameters, *index.buffers) if own is tensor)


def _is_part(gradient: torch.Tensor) -> bool:
    """Return whether a gradient lies in memory that is larger than it."""
    if type(gradient) not in (nn.Parameter, torch.Tensor) or gradient.layout is not torch.strided or gradient.is_meta:
        return False
    return gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size()


_SHARED: Final = "{0!r} {1}, and a cast would separate the two: a write to one would no longer reach the other. {2}"
_TIE: Final = "Make them one parameter, or give each its own memory: parameter.data = parameter.data.clone()"
_VIEW: Final = (
    "Compute the view in forward, or register one tensor in both places, or copy it by .clone(). To cast neither, add "
    "keep_fp32=[{0!r}, {1!r}]"
)
_PART: Final = (
    "Make views of it after mpinit.initialize, or give it its own memory before: "
    "parameter.data = parameter.data.clone()"
)
_GRADIENT: Final = "Make a buffer for gradients after mpinit.initialize, or set them to None before"


def is_16_bit(value: Any) -> bool:
    """Return whether ``value`` is a float16 or bfloat16 tensor."""
    return isinstance(value, torch.Tensor) and is_lower_precision(value.dtype)


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none that could be shared."""
    part = local(tensor)
    return part.untyped_storage().data_ptr() if part.layout is torch.strided and not part.is_meta else 0
