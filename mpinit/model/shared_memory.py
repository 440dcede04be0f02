"""Memory that a parameter shares with other tensors: a cast gives it memory of its own, and they would part unseen."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import nn

from ..basics.modules import modules_of
from ..distributed.sharding import is_sharded


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
