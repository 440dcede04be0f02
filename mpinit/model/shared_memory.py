"""Memory that a parameter or buffer shares with other tensors; a cast would silently separate them."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from ..basics.dtypes import is_lower_precision
from ..basics.modules import ModelIndex
from ..distributed.sharding import local


def check_memory(index: ModelIndex, targets: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Refuse to cast parameters that are a part of larger memory, or have gradients that are.

    Weights of RNNs lie in one tensor, which is made anew after the cast.
    """
    gathered = {id(w) for module in index.names if isinstance(module, nn.RNNBase) for w in module.parameters()}
    seen: dict[int, torch.Tensor] = {}
    for parameter, dtype in targets.items():
        # Without calls for each tensor: models have thousands.
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided or parameter.is_meta:
            continue
        if gathered and id(parameter) in gathered:
            continue
        memory = parameter.untyped_storage()
        other: torch.Tensor = parameter
        count = parameter.numel()
        if count:
            other = seen.setdefault(memory.data_ptr(), parameter)
        if dtype == parameter.dtype and other is parameter:
            continue
        gradient = parameter.grad
        if other is not parameter:
            fault = f"shares memory with {_name_of(other, index)!r}", _TIE
        elif memory.nbytes() > count * parameter.element_size():
            fault = "is a part of larger memory", _PART
        elif gradient is not None and _is_part(gradient):
            fault = "has a gradient that is a part of larger memory", _GRADIENT
        else:
            continue
        raise ValueError(_SHARED.format(_name_of(parameter, index), *fault))
    if index.buffers:
        _check_buffers(index, targets)


def _check_buffers(index: ModelIndex, targets: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Refuse to cast buffers whose memory overlaps that of another buffer or of a parameter.

    Buffers that are different parts of one memory are cast: a write to the one changes no number of the other.
    """
    buffers = dict.fromkeys(tensor for _, tensor in index.buffers if tensor.is_floating_point())
    if all(targets.get(buffer, buffer.dtype) == buffer.dtype for buffer in buffers):
        return
    seen: dict[int, list[torch.Tensor]] = {}
    for tensor in dict.fromkeys(tensor for _, tensor in (*index.parameters, *((None, buffer) for buffer in buffers))):
        if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            continue
        others = seen.setdefault(tensor.untyped_storage().data_ptr(), []) if tensor.numel() else []
        for other in others:
            is_cast = any(targets.get(each, each.dtype) != each.dtype for each in (tensor, other))
            if tensor in buffers and is_cast and _overlap(tensor, other):
                names = _name_of(tensor, index), _name_of(other, index)
                raise ValueError(_SHARED.format(names[0], f"shares memory with {names[1]!r}", _VIEW.format(*names)))
        others.append(tensor)


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
