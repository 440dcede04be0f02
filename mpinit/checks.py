"""What ``initialize`` was given, checked before anything is changed."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import registry
from .basics.dtypes import is_lower_precision
from .basics.user_warnings import warn_user
from .distributed.sharding import reshard
from .model.entry_points import check_argument_names
from .plan import Plan
from .settings.properties import Properties

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def as_list(given: Any, kind: type, what: str) -> list[Any]:
    """One object, or a list or tuple of them, as a list.

    Raises:
        TypeError: something else.
    """
    items = list(given) if isinstance(given, (list, tuple)) else [given]
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(f"{what} must be a {kind.__name__}, or a list or tuple of them; got {type(item).__name__}")
    return items


def check(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], props: Properties, plan: Plan) -> None:
    """Raise a ValueError for whatever cannot be initialised; issue the warnings."""
    _check_unique(models, "models")
    _check_unique(optimizers, "optimizers")
    for model in models:
        _check_not_wrapped(model)
        _check_not_lazy(model)
    for owner in (*models, *optimizers):
        owning = registry.of(owner)
        if owning is not None:
            raise ValueError(
                f"{type(owner).__name__} was initialised already, in {owning.describe()}: "
                "call mpinit.undo on it first, or pass all models and optimizers that belong together in one call"
            )
    _check_kept_names(models, props)
    check_argument_names(models, props.entry_points, props.keep_inputs)
    # No check comes after this, and FSDP's gathered weights are not those that the warnings are about.
    reshard(models)
    if plan.patch_functions:
        _warn_of_16_bit_weights(models)
    for optimizer in optimizers:
        _warn_of_orphans(models, optimizer)


def _check_unique(objects: Sequence[Any], what: str) -> None:
    seen: set[int] = set()
    for item in objects:
        if id(item) in seen:
            raise ValueError(f"{what} holds the same {type(item).__name__} twice; give each one once")
        seen.add(id(item))


def _check_not_wrapped(model: nn.Module) -> None:
    if type(model).__name__ in _WRAPPERS:
        raise ValueError(
            f"the model is wrapped in {type(model).__name__} already, which has taken the parameters' dtypes down; "
            f"call mpinit.initialize on the model inside first, and wrap what it returns in {type(model).__name__}"
        )


def _check_not_lazy(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{name!r} of {type(model).__name__} is not initialised yet (a lazy module): run one forward pass on "
                "example data first, make the optimizer, then call mpinit.initialize"
            )


def _check_kept_names(models: Sequence[nn.Module], props: Properties) -> None:
    names = [name for model in models for name, _ in model.named_modules() if name]
    for pattern in props.keep_fp32:
        if isinstance(pattern, str) and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            hint = f"; near it are {', '.join(map(repr, near))}" if near else ""
            raise ValueError(f"keep_fp32={pattern!r} matches no module{hint}. Names are those of model.named_modules()")


def names_in_16_bit(models: Iterable[nn.Module]) -> list[str]:
    """The dotted names of 16-bit parameters."""
    return [name for model in models for name, p in model.named_parameters() if is_lower_precision(p.dtype)]


def _warn_of_16_bit_weights(models: Sequence[nn.Module]) -> None:
    names = names_in_16_bit(models)
    if names:
        warn_user(
            f"{len(names)} weights are 16-bit already ({', '.join(names[:3])} first), but patched functions (O1) are "
            "made for float32 weights: their updates will be lost to rounding. Give the model in float32, or use "
            "opt_level='O2'"
        )


def _warn_of_orphans(models: Sequence[nn.Module], optimizer: Optimizer) -> None:
    """Parameters of a loss function are legitimate; ones left over from before the model was copied are not."""
    belonging = {id(parameter) for model in models for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not models or not given or any(id(parameter) in belonging for parameter in given):
        return
    by_shape: dict[torch.Size, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            by_shape.setdefault(parameter.shape, name)
    if not all(parameter.shape in by_shape for parameter in given):
        return
    first = ", ".join(f"parameter {i} (shaped like {by_shape[p.shape]!r})" for i, p in enumerate(given[:3]))
    warn_user(
        f"none of the parameters of {type(optimizer).__name__} belongs to the models, though all have the shapes of "
        f"theirs: {first}. It was probably made before the model was copied or moved; make the optimizer from the "
        "parameters of the model given to mpinit.initialize"
    )
