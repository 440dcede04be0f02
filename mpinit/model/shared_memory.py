"""Memory that a parameter shares with other tensors: a cast gives it memory of its own, and they would part unseen."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from ..basics.dtypes import is_lower_precision
from ..basics.modules import modules_of
from ..distributed.sharding import is_sharded, local


def check_memory(models: Sequence[nn.Module], targets: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Refuse to cast parameters that are a part of larger memory, or have gradients that are.

    Weights of RNNs lie in one tensor, which is made anew after the cast.
    """
    rnns = (module for model in models for module in modules_of(model) if isinstance(module, nn.RNNBase))
    gathered = {id(weight) for rnn in rnns for weight in rnn.parameters()}
    seen: dict[int, torch.Tensor] = {}
    for parameter, dtype in targets.items():
        if type(parameter) is not nn.Parameter or id(parameter) in gathered or not _has_memory(parameter):
            continue
        other: torch.Tensor = parameter
        if parameter.numel():
            other = seen.setdefault(parameter.untyped_storage().data_ptr(), parameter)
        if dtype == parameter.dtype and other is parameter:
            continue
        gradient, fault = parameter.grad, None
        if other is not parameter:
            fault = f"shares memory with {_name_of(other, models)!r}", _TIE
        elif _is_part(parameter):
            fault = "is a part of larger memory", _PART
        elif gradient is not None and _has_memory(gradient) and _is_part(gradient):
            fault = "has a gradient that is a part of larger memory", _GRADIENT
        if fault is not None:
            raise ValueError(_SHARED.format(_name_of(parameter, models), *fault))


def _name_of(parameter: torch.Tensor, models: Iterable[nn.Module]) -> str:
    return next(name for model in models for name, own in model.named_parameters() if own is parameter)


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (nn.Parameter, torch.Tensor) and not is_sharded(tensor)
    return plain and tensor.layout is torch.strided and not tensor.is_meta


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


_SHARED: Final = (
    "{0!r} {1}, and its cast would give it memory of its own: what is written to the one would not reach the other any "
    "more. {2}"
)
_TIE: Final = "Make them one parameter, or give each memory of its own, by parameter.data = parameter.data.clone()"
_PART: Final = (
    "Make views of it after mpinit.initialize, or give it memory of its own before, by "
    "parameter.data = parameter.data.clone()"
)
_GRADIENT: Final = "Make a buffer for gradients after mpinit.initialize, or set them to None before"


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


def same_view(
    view: torch.Tensor, owner: torch.Tensor, float32_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """View the float32 tensor of ``owner`` as ``view``, a 16-bit tensor in the same memory, views that."""
    values = float32_of(owner, owner)
    if view.shape == owner.shape and view.stride() == owner.stride():
        return values
    if values.stride() != owner.stride() or values.layout is not torch.strided:
        return view.float()
    offset = view.storage_offset() - owner.storage_offset() + values.storage_offset()
    return values.as_strided(view.size(), view.stride(), offset)
