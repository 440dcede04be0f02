"""What ``initialize`` and the like were given, where there are other processes; checked before anything is changed."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from .basics.dtypes import is_lower_precision
from .basics.modules import Walk
from .distributed.agreement import meshes_of, reach
from .distributed.sharding import flattened, is_distributed, replaced_since
from .plan import Plan

_REDUCES: Final = "DistributedDataParallel"
_FLATTENS: Final = "FullyShardedDataParallel"
_WRAPPERS: Final = (_REDUCES, "DataParallel", _FLATTENS)


def check_not_wrapped(walk: Walk, plan: Plan) -> None:
    """Refuse what has recorded the parameters' dtypes, around a model or in it.

    Parts in DataParallel are refused when it makes its replicas, which it does for several devices only.
    """
    casts = plan.cast_model and is_lower_precision(plan.model_dtype)
    wrappers: dict[type[nn.Module], str | None] = {}
    for model in walk.models:
        _check_root(model)
    for name, module in walk.modules:
        if type(module) not in wrappers:
            wrappers[type(module)] = _wrapper(type(module))
        wrapper = wrappers[type(module)]
        if wrapper == _FLATTENS:
            raise ValueError(flattened(f"{name!r}"))
        if wrapper == _REDUCES and casts:
            raise ValueError(
                f"{name!r} is wrapped in {wrapper} already, which has recorded the parameters' dtypes; call "
                f"mpinit.initialize first, and wrap {name!r} in {wrapper} afterwards"
            )


def _check_root(model: nn.Module) -> None:
    inside = model
    # What torch.compile makes of a module.
    while "_orig_mod" in inside._modules:
        inside = inside._modules["_orig_mod"]  # type: ignore[assignment]
    wrapper = _wrapper(type(inside))
    compiled = "" if inside is model else ", inside torch.compile,"
    if wrapper == _FLATTENS:
        raise ValueError(flattened(f"the model{compiled}"))
    if wrapper is not None:
        raise ValueError(
            f"the model{compiled} is wrapped in {wrapper} already, which has recorded the parameters' dtypes; "
            f"call mpinit.initialize on the model inside first, and wrap what it returns in {wrapper}"
        )


def _wrapper(kind: type[nn.Module]) -> str | None:
    return next((base.__name__ for base in kind.__mro__ if base.__name__ in _WRAPPERS), None)


def check_not_left_behind(walk: Walk, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that were made before the model was sharded, or got its memory."""
    given = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    fault = replaced_since(walk.parameters, given)
    if fault:
        raise ValueError(fault)


def check_process_group(group: Any, models: Sequence[nn.Module], plan: Plan) -> None:
    """Refuse a group that is none, and shards among which overflow cannot be agreed on without one."""
    if group is not None:
        if not is_distributed():
            raise ValueError(
                "process_group was given, but torch.distributed is not initialised: init_process_group comes first"
            )
        if not isinstance(group, torch.distributed.ProcessGroup):
            raise TypeError(f"process_group must be a torch.distributed.ProcessGroup of this process, not {group!r}")
    elif plan.scaling.dynamic and is_distributed():
        meshes = meshes_of(parameter for model in models for parameter in model.parameters())
        world = torch.distributed.get_world_size()
        if meshes and reach(meshes) < world:
            raise ValueError(
                f"the model's parameters are sharded over {reach(meshes)} of {world} ranks, and with a dynamic loss "
                "scale all ranks that train one model have to skip the same steps: give process_group="
                "torch.distributed.group.WORLD where the others hold other parts of it (pipeline stages), or "
                "process_group=mesh.get_group() where they train something else"
            )
