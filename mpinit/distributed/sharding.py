"""Sharded parameters: FSDP2's DTensors, whose data is changed in place, and what FSDP remembers of it.

Asked without importing torch's distributed packages, which are slow to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

_TENSOR_DATA: Final[Any] = torch.Tensor.data  # not the one of a parameter, which may be watched


def is_distributed() -> bool:
    """Whether this process belongs to a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "device_mesh")


def is_managed_by_fsdp(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a module."""
    return hasattr(type(module), "_get_fsdp_state")


def local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that is in this process: all of it, unless it is sharded."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def locals_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`local` for many; cheap where there is no process group."""
    return [local(tensor) for tensor in tensors] if is_distributed() else tensors


def set_data(tensor: Any, values: Any) -> None:
    """``tensor.data = values``, whatever class ``tensor`` is of; a sharded tensor's inner part follows.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> set_data(weight, torch.ones(2, dtype=torch.float16)); weight.dtype
        torch.float16
    """
    _TENSOR_DATA.__set__(tensor, values)
    if is_sharded(values):
        # torch changes the wrapper only.
        tensor._local_tensor, tensor._spec = values._local_tensor, values._spec


def _groups(model: nn.Module) -> Iterator[Any]:
    """The groups of parameters that FSDP gathers together."""
    for module in model.modules():
        if is_managed_by_fsdp(module):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            # torch 2.11 knows one group of a module, or None; from 2.12 on it is a list of any length.
            if hasattr(state, "_fsdp_param_groups"):
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group is not None:
                yield state._fsdp_param_group


def reshard(models: Iterable[nn.Module]) -> None:
    """Let FSDP put the shards back on the modules, where a forward left the gathered weights on them."""
    for module in (module for model in models for module in model.modules()):
        if is_managed_by_fsdp(module):
            module.reshard()  # type: ignore[operator]


def check_groups(models: Sequence[nn.Module], targets: Mapping[torch.Tensor, torch.dtype]) -> None:
    """FSDP gathers a group's parameters in one buffer, so that they must have one dtype.

    Raises:
        ValueError: a group would have two.
    """
    for group in (group for model in models for group in _groups(model)):
        found: dict[torch.dtype, str] = {}
        for entry in group.fsdp_params:
            parameter = entry.sharded_param
            if parameter.requires_grad:
                name = entry._param_fqn or entry._module_info.param_name
                found.setdefault(targets.get(parameter, parameter.dtype), name)
        if len(found) > 1:
            both = " and ".join(f"{name!r} in {dtype}" for dtype, name in found.items())
            raise ValueError(
                f"fully_shard has put parameters into one group that are to be in different dtypes ({both}), and FSDP "
                "gathers a group in one dtype: call fully_shard on the modules that stay float32 (BatchNorm, "
                "keep_fp32) by themselves before it is called on the model, or give keep_batchnorm_fp32=False"
            )


def rebuild_groups(models: Iterable[nn.Module]) -> None:
    """Let FSDP look at its parameters again after a cast: it holds on to their data and to buffers of their dtype."""
    for group in (group for model in models for group in _groups(model)):
        for entry in group.fsdp_params:
            entry.reset_sharded_param()
            entry.all_gather_outputs.clear()
            vars(entry).pop("_unsharded_param", None)
        group._init_mp_dtypes()
