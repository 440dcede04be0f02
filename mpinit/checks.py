"""Checks of the arguments of ``initialize``, made before anything is changed."""

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim import Optimizer

from . import registry
from .basics.dtypes import dtype_name, is_lower_precision
from .basics.logs import warn_user
from .basics.modules import ModelIndex
from .basics.tables import counted, nearest
from .basics.wrappers import wrapped_in
from .config.plan import MasterWeightsMode, Plan
from .distributed.sharding import (
    fsdp1_refusal,
    fsdp2_refusal,
    is_distributed,
    is_managed_by_fsdp,
    replaced_since,
    reshard,
)
from .distributed.verdict import meshes_of
from .model.entry_points import check_argument_names
from .model.precision_loss import check_values, warn_about_small_eps, warn_about_states, warn_about_target_networks
from .model.selection import Selection, select
from .model.shared_memory import check_memory
from .optimizer.members import parameters_of, trained_by
from .optimizer.optimizers import check_optimizers

_KINDS: Final[dict[type, str]] = {nn.Module: "a torch.nn.Module", Optimizer: "a torch.optim.Optimizer"}


def as_list(value: Any, kind: type, what: str) -> list[Any]:
    """Return one object, or a list or tuple of them, as a list.

    Raises:
        TypeError: an object of another kind; the message names the likely mistake.
    """
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if not isinstance(item, kind):
            got = f"the class {item.__name__}" if isinstance(item, type) else type(item).__name__
            raise TypeError(f"{what} must be {_KINDS[kind]}, or a list or tuple of them; got {got}{_hint(item, kind)}")
    return items


def _hint(item: Any, kind: type) -> str:
    """Describe the likely mistake behind an object of a wrong type."""
    if isinstance(item, type) and issubclass(item, kind):
        return ", not an object of it: make one first"
    if isinstance(item, (Optimizer, nn.Module)):
        return ". Models come first and optimizers second: are the two swapped?"
    if isinstance(item, (Iterator, nn.Parameter)):
        value = "the model itself" if kind is nn.Module else "the optimizer that was made from the parameters"
        return f", as model.parameters() contains or is: pass {value}"
    if isinstance(item, torch.Tensor):
        return ". The loss comes first and its optimizers second: are the two swapped?"
    if isinstance(item, Mapping):
        return ", as state_dict() returns: pass the object that has it"
    if kind is Optimizer and callable(getattr(item, "step", None)):
        return (
            ", whose class is not derived from torch.optim.Optimizer: derive it, or initialise the model alone, with "
            'master_weights="model" at opt_level="O5", whose parameters stay float32 for an optimizer of any kind'
        )
    return ""


def as_optimizers(value: Any) -> list[Any]:
    """Return optimizers as :func:`as_list` does, without wrappers that only forward to them."""
    items = [registry.unwrapped(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
    for item in items:
        inner = None if isinstance(item, Optimizer) else wrapped_in(item)
        if isinstance(inner, Optimizer):
            raise TypeError(
                f"{type(item).__name__} is not a torch.optim.Optimizer. Pass the {type(inner).__name__} in it to "
                "initialize; if it wraps the optimizer's step, make it again afterwards"
            )
    return as_list(items, Optimizer, "optimizers")


def check(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], plan: Plan, awaits: bool, process_group: Any
) -> Selection:
    """Refuse objects that cannot be initialised, and issue the warnings. Returns what the plan changes."""
    props = plan.properties
    for model in models:
        _check_not_prepared(model)
    index = ModelIndex(models)
    if reshard(index.names):
        index.read_tensors()  # those before were the weights that FSDP had gathered
    _check_modules(index, plan)
    for name, tensor in (*index.parameters, *index.buffers):
        if isinstance(tensor, UninitializedTensorMixin):
            raise ValueError(
                f"{name!r} is not initialised yet (a lazy module): run one forward pass on "
                "example data first, make the optimizer, then call mpinit.initialize"
            )
        if props.casts_to_16_bit and isinstance(tensor, nn.Parameter) and tensor.is_inference():
            raise ValueError(
                f"{name!r} was made in torch.inference_mode(), where torch counts no writes: make the model outside of "
                "that block, or under torch.no_grad()"
            )
    if plan.cast_model and {parameter.dtype for _, parameter in index.parameters} == {torch.float64}:
        raise ValueError(
            "all parameters are float64, which mpinit never casts, and inputs would be "
            f"{dtype_name(plan.model_dtype)}: call model.float() before the optimizer is made, or use O1 or O4"
        )
    _check_not_shared(index, plan)
    _check_stepped_by_one_session(index, optimizers, plan)
    for keyword, entries in (("keep_fp32", props.keep_fp32), ("compute_fp32", props.compute_fp32)):
        if any(isinstance(entry, str) for entry in entries):
            _check_names_of_modules(index, keyword, entries)
    # Optimizers that were made before the model was sharded, or moved off the meta device by to_empty().
    replaced = replaced_since(index.parameters, parameters_of(optimizers))
    if replaced:
        raise ValueError(replaced)
    selection = select(index, plan)
    if props.keep_inputs:
        check_argument_names(index, selection.entry_points, props.keep_inputs)
    in_16_bit = [name for tensor, name in selection.came_in_16_bit.items() if isinstance(tensor, nn.Parameter)]
    if props.patch_torch_functions and in_16_bit:
        warn_user(
            f"{counted(len(in_16_bit), 'weight is', 'weights are')} 16-bit already ({', '.join(in_16_bit[:3])} first), "
            "but patched functions (O1) are made for float32 weights: their updates will be lost to rounding. Pass the "
            "model in float32, or use opt_level='O2'"
        )
    _check_belonging(index, optimizers, awaits)
    if plan.cast_model and plan.model_dtype is torch.float16:
        warn_about_small_eps(index, selection.float32_modules)
    if (plan.model_dtype if plan.cast_model else plan.function_dtype) is torch.bfloat16:
        warn_about_states(index, {*selection.float32_modules, *selection.computes}, plan.cast_model)
    if len(models) > 1 and not awaits and plan.makes_masters:
        warn_about_target_networks(index, optimizers)
    _check_process_group(process_group, index, plan)
    if selection.changes:
        check_memory(index, selection.targets)
        for name, parameter in index.parameters:
            if hasattr(parameter, "_in_backward_optimizers"):
                raise ValueError(
                    f"_apply_optimizer_in_backward was called for {name!r} before mpinit.initialize, and torch drops "
                    "its hooks when a parameter's dtype changes: nothing would be trained. Call mpinit.initialize("
                    "model, await_optimizers=True), then it, then mpinit.add_optimizers on all parameters' "
                    "_in_backward_optimizers"
                )
    check_optimizers(optimizers, plan)
    trained = {*map(id, trained_by(optimizers)), *(id(p) for _, p in index.parameters if awaits and p.requires_grad)}
    clamped = check_values(index, selection.targets, trained if plan.makes_masters else ())
    return replace(selection, clamped=clamped)


def check_free(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Refuse an object that is listed twice, or is in a session already."""
    for objects, what in ((models, "models"), (optimizers, "optimizers")):
        for item, times in Counter(objects).most_common(1):
            if times > 1:
                raise ValueError(f"{what} contains the same {type(item).__name__} twice; pass each one once")
    for owner in (*models, *optimizers):
        owning = registry.of(owner)
        if owning is not None:
            raise ValueError(
                f"{type(owner).__name__} was initialised already, in {owning.describe()}: "
                "call mpinit.undo on it first, or pass all models and optimizers that belong together in one call"
            )


def _check_not_prepared(model: nn.Module) -> None:
    kind = type(model).__name__
    # Lightning Fabric's setup and Accelerate's prepare add these.
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


_REDUCES: Final = "DistributedDataParallel"
_FLATTENS: Final = "FullyShardedDataParallel"
_WRAPPERS: Final = (_REDUCES, "DataParallel", _FLATTENS)


def _check_modules(index: ModelIndex, plan: Plan) -> None:
    """Refuse scripted modules, and wrappers that have recorded the parameters' dtypes, around a model or in it.

    Parts in DataParallel are refused when it makes its replicas, which it does for several devices only.
    """
    casts = plan.cast_model and is_lower_precision(plan.model_dtype)
    kinds = {type(module) for module in index.names}
    wrappers = {k: next((b.__name__ for b in k.__mro__ if b.__name__ in _WRAPPERS), None) for k in kinds}
    for name, module in index.named_modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{repr(name) if name else 'the model'} is a torch.jit.ScriptModule ({type(module).__name__}), whose "
                "forward is compiled and cannot have casts put around it: call mpinit.initialize with the module that "
                "it was made from in its place, and torch.jit.trace the model afterwards"
            )
        if plan.masters is MasterWeightsMode.IN_MODEL and is_managed_by_fsdp(module):
            raise ValueError(fsdp2_refusal(repr(name or type(module).__name__)))
        wrapper = wrappers[type(module)]
        if wrapper is None:
            continue
        # A module of torch.compile has the original as _orig_mod.
        is_root = not name.replace("_orig_mod", "").strip(".")
        what = f"the model{', inside torch.compile,' if name else ''}" if is_root else repr(name)
        if wrapper == _FLATTENS:
            raise ValueError(fsdp1_refusal(what))
        if is_root or (wrapper == _REDUCES and casts):
            raise ValueError(
                f"{what} is wrapped in {wrapper} already, which has recorded the parameters' dtypes; call "
                f"mpinit.initialize on the model inside first, and wrap what it returns in {wrapper} afterwards"
            )


def _check_not_shared(index: ModelIndex, plan: Plan) -> None:
    """Refuse a tensor that another session has and one of the two casts, because the undo of one would break it."""
    casts = plan.cast_model and is_lower_precision(plan.model_dtype)
    others = [s for s in registry.live() if casts or (s.plan.cast_model and is_lower_precision(s.plan.model_dtype))]
    own_ids = index.tensor_ids() if others else frozenset()
    for session in others:
        if session.members.tensor_ids.isdisjoint(own_ids):
            continue
        shared = ModelIndex(session.models).tensor_ids()
        for name, module in index.named_modules:
            if any(id(tensor) in shared for _, tensor in index.own[module]):
                which = f"{name!r}, a {type(module).__name__}," if name else f"the {type(module).__name__} passed"
                raise ValueError(
                    f"{which} shares tensors with a model of {session.describe()}, and one of the two sessions casts "
                    "them. Pass all models and optimizers that belong together in one call of mpinit.initialize, or "
                    "call mpinit.undo on the other first"
                )


def _check_stepped_by_one_session(index: ModelIndex, optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Refuse an optimizer of one session for weights that another one casts: it would not step their masters."""
    own_ids = index.tensor_ids()
    for session in registry.live():
        found: list[Optimizer] = []
        if session.properties.casts_to_16_bit:
            found += [optimizer for optimizer in optimizers if session.has_one_of(parameters_of([optimizer]))]
        if plan.properties.casts_to_16_bit:
            found += [o for o in session.optimizers if not own_ids.isdisjoint(map(id, parameters_of([o])))]
        if found:
            raise ValueError(
                f"this {type(found[0]).__name__} steps weights of {session.describe()} and of another session. "
                "Pass all models and optimizers that belong together in one call of mpinit.initialize, or make an "
                "optimizer for the weights of each"
            )


def _check_names_of_modules(index: ModelIndex, keyword: str, entries: Sequence[Any]) -> None:
    modules = [name for name, _ in index.paths if name]
    keeps = keyword == "keep_fp32"
    names = [*modules, *(dict(index.named_tensors()) if keeps else ())]
    for pattern in entries:
        if isinstance(pattern, str) and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            tensors = ", parameter or buffer" if keeps else ""
            raise ValueError(f"{keyword}={pattern!r} is the name of no module{tensors}{nearest(pattern, names)}")


def _check_belonging(index: ModelIndex, optimizers: Sequence[Optimizer], awaits: bool) -> None:
    """Refuse optimizers over parameters of before the model was copied, but not over parameters of a loss."""
    own = {id(parameter) for _, parameter in index.parameters}
    shapes = {parameter.shape for _, parameter in index.parameters}
    stepped = {optimizer: parameters_of([optimizer]) for optimizer in optimizers}
    stray = {o: ps for o, ps in stepped.items() if own and ps and not any(id(p) in own for p in ps)}
    # The optimizer of a loss has parameters of other shapes, and comes with one of the model's.
    replaced = [o for o, ps in stray.items() if all(p.shape in shapes for p in ps)]
    if replaced or (len(stray) == len(optimizers) > 0 and not awaits):
        kinds = dict.fromkeys(type(optimizer).__name__ for optimizer in replaced or stray)
        raise ValueError(
            f"none of the parameters of {' and '.join(kinds)} belongs to the models "
            f"({', '.join(type(model).__name__ for model in index.models)}), which would not be trained: make the "
            "optimizer from model.parameters(), after the model was copied or moved for the last time. Where it is for "
            "a loss with parameters of its own, pass the model's optimizer too, or "
            "await_optimizers=True if that comes later"
        )


def _check_process_group(group: Any, index: ModelIndex, plan: Plan) -> None:
    """Validate ``process_group``; refuse shards among which overflow cannot be agreed on without one."""
    meshes = meshes_of([parameter for _, parameter in index.parameters]) if is_distributed() else []
    if group is not None:
        if not is_distributed():
            raise ValueError(
                "process_group was passed, but torch.distributed is not initialised: init_process_group comes first"
            )
        if not isinstance(group, torch.distributed.ProcessGroup):
            raise TypeError(f"process_group must be a torch.distributed.ProcessGroup of this process, not {group!r}")
    elif plan.skips and meshes:
        world = torch.distributed.get_world_size()
        # The ranks of the largest mesh have all others' numbers after a reduction along each of its dimensions.
        reached = max(mesh.size() for mesh in meshes)
        if reached < world:
            raise ValueError(
                f"the model's parameters are sharded over {reached} of {world} ranks. With a dynamic loss scale or "
                "skip_nonfinite=True, all ranks that train one model have to skip the same steps. If the others have "
                "other parts of it (pipeline stages), pass process_group=torch.distributed.group.WORLD. If they train "
                "something else, pass process_group=mesh.get_group()"
            )
