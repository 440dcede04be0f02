"""What ``initialize`` was given, checked before anything is changed."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from . import registry
from .basics.dtypes import is_lower_precision
from .basics.modules import dotted, modules_of, named_modules_of
from .basics.tables import counted
from .basics.user_warnings import warn_user
from .basics.wrappers import inside
from .checks_of_ranks import check_not_left_behind, check_not_wrapped
from .distributed.sharding import is_managed_by_fsdp, reshard
from .model.aliases import named_own_tensors
from .model.entry_points import check_argument_names
from .model.selection import ids_of_tensors, named_tensors, own_tensors
from .plan import Masters, Plan

if TYPE_CHECKING:
    from .settings.properties import Properties

# How many names a message lists where none is near.
_LISTED: Final = 6
_KINDS: Final[dict[type, str]] = {nn.Module: "a torch.nn.Module", Optimizer: "a torch.optim.Optimizer"}


def as_list(given: Any, kind: type, what: str) -> list[Any]:
    """One object, or a list or tuple of them, as a list.

    Raises:
        TypeError: something else.
    """
    items = list(given) if isinstance(given, (list, tuple)) else [given]
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(
                f"{what} must be {_KINDS[kind]}, or a list or tuple of them; got {_said(item)}{_hint(item, kind)}"
            )
    return items


def _said(item: Any) -> str:
    return f"the class {item.__name__}" if isinstance(item, type) else f"{type(item).__name__}"


def _hint(item: Any, kind: type) -> str:
    """What was probably meant."""
    if isinstance(item, type) and issubclass(item, kind):
        return ", not an object of it: make one first"
    if isinstance(item, (Optimizer, nn.Module)):
        return ". Models come first and optimizers second: are the two swapped?"
    if isinstance(item, (Iterator, nn.Parameter)):
        given = "the model itself" if kind is nn.Module else "the optimizer that was made from the parameters"
        return f", as model.parameters() holds or is: give {given}"
    if isinstance(item, torch.Tensor):
        return ". The loss comes first and its optimizers second: are the two swapped?"
    if isinstance(item, Mapping):
        return ", as state_dict() returns: give the object that has it"
    return ""


def as_optimizers(given: Any) -> list[Any]:
    """:func:`as_list` of optimizers, those in wrappers that only hand on to them taken out.

    Raises:
        TypeError: something else; where it holds an optimizer the message names that.
    """
    items = [registry.unwrapped(item) for item in (given if isinstance(given, (list, tuple)) else [given])]
    for item in items:
        inner = None if isinstance(item, Optimizer) else inside(item)
        if isinstance(inner, Optimizer):
            raise TypeError(
                f"{type(item).__name__} is no Optimizer, and steps in a way of its own: give the "
                f"{type(inner).__name__} inside of it, and wrap that afterwards"
            )
    return as_list(items, Optimizer, "optimizers")


def check(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], props: Properties, plan: Plan, awaits: bool = False
) -> None:
    """Raise a ValueError for whatever cannot be initialised; issue the warnings.

    Args:
        models, optimizers: what was given.
        props, plan: what was asked for.
        awaits: whether other optimizers come later.
    """
    check_free(models, optimizers)
    for model in models:
        _check_not_prepared(model)
    check_not_wrapped(models, plan)
    for model in models:
        _check_not_lazy(model)
    if plan.masters is Masters.IN_MODEL:
        _check_not_fully_sharded(models)
    _check_not_shared(models, plan)
    _check_kept_names(models, props)
    if props.entry_points or props.keep_inputs:
        check_argument_names(models, props.entry_points, props.keep_inputs)
    check_not_left_behind(models, optimizers)
    # No check comes after this, and FSDP's gathered weights are not those that the warnings are about.
    reshard(models)
    if plan.patch_functions:
        _warn_of_16_bit_weights(models)
    _check_belonging(models, optimizers, awaits)


def check_free(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Raise a ValueError where an object is given twice, or is in a session already."""
    _check_unique(models, "models")
    _check_unique(optimizers, "optimizers")
    for owner in (*models, *optimizers):
        owning = registry.of(owner)
        if owning is not None:
            raise ValueError(
                f"{type(owner).__name__} was initialised already, in {owning.describe()}: "
                "call mpinit.undo on it first, or pass all models and optimizers that belong together in one call"
            )


def _check_unique(objects: Sequence[Any], what: str) -> None:
    seen: set[int] = set()
    for item in objects:
        if id(item) in seen:
            raise ValueError(f"{what} holds the same {type(item).__name__} twice; give each one once")
        seen.add(id(item))


def _check_not_prepared(model: nn.Module) -> None:
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"the model is a torch.jit.ScriptModule ({kind}), whose forward is compiled and cannot have casts put "
            "around it: call mpinit.initialize on the module that it was made from, and torch.jit.trace that"
        )
    # What Lightning Fabric's setup and Accelerate's prepare leave behind.
    if "_forward_module" in model._modules:
        raise ValueError(
            f"the model was wrapped by Lightning Fabric already ({kind}), which casts for itself: call "
            "mpinit.initialize on the module and the optimizer first, and hand both to fabric.setup, with "
            "Fabric(precision='32-true')"
        )
    if "_original_forward" in vars(model):
        raise ValueError(
            f"{kind} was prepared for mixed precision by Accelerate already, which casts for itself (its "
            "_original_forward is inside): prepare it with Accelerator(mixed_precision='no'), or call "
            "mpinit.initialize before prepare does"
        )


def _check_not_fully_sharded(models: Sequence[nn.Module]) -> None:
    for name, module in (named for model in models for named in model.named_modules()):
        if is_managed_by_fsdp(module):
            raise ValueError(
                f"fully_shard was called on {name or type(module).__name__!r}: FSDP2 puts the gathered parameters on "
                'modules inside forward, where master_weights="model" puts its casts. Use master_weights=True (O2, '
                "O5), where FSDP2's own float32 shards are the masters"
            )


def _check_not_shared(models: Sequence[nn.Module], plan: Plan) -> None:
    """Two sessions cannot cast one tensor: the undo of one would break the other."""
    casts = plan.cast_model and is_lower_precision(plan.model_dtype)
    others = [s for s in registry.live() if casts or (s.plan.cast_model and is_lower_precision(s.plan.model_dtype))]
    given = ids_of_tensors(models) if others else frozenset()
    for session in others:
        if session.tensor_ids.isdisjoint(given):
            continue
        taken = {tensor for other in session.models for module in modules_of(other) for tensor in own_tensors(module)}
        for name, module in (named for model in models for named in named_modules_of(model)):
            if any(tensor in taken for tensor in own_tensors(module)):
                which = f"{name!r}, a {type(module).__name__}," if name else f"the {type(module).__name__} given"
                raise ValueError(
                    f"{which} shares tensors with a model of {session.describe()}, and one of the two sessions casts "
                    "them: pass all models and optimizers that belong together in one call of mpinit.initialize, or "
                    "call mpinit.undo on the other first"
                )


def _check_not_lazy(model: nn.Module) -> None:
    if not any(nn.parameter.is_lazy(tensor) for module in modules_of(model) for tensor in own_tensors(module)):
        return
    for module_name, module in named_modules_of(model):
        for name, tensor in named_own_tensors(module):
            if nn.parameter.is_lazy(tensor):
                raise ValueError(
                    f"{dotted(module_name, name)!r} of {type(model).__name__} is not "
                    "initialised yet (a lazy module): run one forward pass on example data first, make the "
                    "optimizer, then call mpinit.initialize"
                )


def _check_kept_names(models: Sequence[nn.Module], props: Properties) -> None:
    if not any(isinstance(pattern, str) for pattern in props.keep_fp32):
        return
    modules = [name for model in models for name, _ in model.named_modules(remove_duplicate=False) if name]
    names = [*modules, *dict(named_tensors(models))]
    for pattern in props.keep_fp32:
        if isinstance(pattern, str) and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            most = near or modules[:_LISTED] or names[:_LISTED]
            hint = f"; {'near it are' if near else 'there are'} {', '.join(map(repr, most))}" if most else ""
            more = " and others" if not near and len(names) > len(most) else ""
            raise ValueError(
                f"keep_fp32={pattern!r} matches no module{hint}{more}. Names are those of model.named_modules(), "
                "or of parameters and buffers"
            )


def names_in_16_bit(models: Iterable[nn.Module]) -> list[str]:
    """The dotted names of 16-bit parameters."""
    found: dict[int, str] = {}
    for module_name, module in (named for model in models for named in named_modules_of(model)):
        for name, parameter in module._parameters.items():
            if parameter is not None and is_lower_precision(parameter.dtype):
                found.setdefault(id(parameter), dotted(module_name, name))
    return list(found.values())


def _warn_of_16_bit_weights(models: Sequence[nn.Module]) -> None:
    names = names_in_16_bit(models)
    if names:
        warn_user(
            f"{counted(len(names), 'weight is', 'weights are')} 16-bit already ({', '.join(names[:3])} first), but "
            "patched functions (O1) are made for float32 weights: their updates will be lost to rounding. Give the "
            "model in float32, or use opt_level='O2'"
        )


def _check_belonging(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], awaits: bool) -> None:
    """Parameters of a loss are legitimate beside a model's; ones left over from before it was copied are not."""
    own = {id(t) for model in models for module in modules_of(model) for t in module._parameters.values()}
    shapes: dict[torch.Size, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            shapes.setdefault(parameter.shape, name)
    stray = {o: given for o in optimizers if (given := [p for group in o.param_groups for p in group["params"]])}
    for optimizer, given in list(stray.items()):
        if not own or any(id(parameter) in own for parameter in given):
            del stray[optimizer]
        elif all(parameter.shape in shapes for parameter in given):
            first = ", ".join(f"parameter {i} (shaped like {shapes[p.shape]!r})" for i, p in enumerate(given[:3]))
            raise ValueError(
                f"none of the parameters of {type(optimizer).__name__} belongs to the models, though all have the "
                f"shapes of theirs: {first}. It was made before the model was copied or moved, or from another: make "
                "the optimizer from the parameters of the model given to mpinit.initialize"
            )
    if stray and len(stray) == len(optimizers) and not awaits:
        raise ValueError(
            f"none of the parameters of {' and '.join(type(optimizer).__name__ for optimizer in stray)} belongs to the "
            f"models ({', '.join(type(model).__name__ for model in models)}), which would not be trained: make the "
            "optimizer from model.parameters(). Where it is for a loss with parameters of its own, give the model's "
            "optimizer too, or await_optimizers=True if that comes later"
        )
