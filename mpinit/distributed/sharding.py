"""Sharded parameters: access to DTensors, and FSDP2's groups of parameters.

Nothing here imports torch's distributed packages, which are slow to import.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from ..basics.bulk import are_alike, consume
from ..basics.modules import modules_of

_CAN_BE_DISTRIBUTED: Final = torch.distributed.is_available()  # as torch was built
_TENSOR_DETACH: Final[Any] = torch.Tensor.detach
_TENSOR_DATA: Final[Any] = torch.Tensor.data  # not the one of a parameter, which may be watched


_PLAIN: Final = (torch.Tensor, nn.Parameter)


# Return whether this process belongs to a process group: torch's own function, because every forward and step calls it.
is_distributed: Final[Callable[[], bool]] = torch.distributed.is_initialized if _CAN_BE_DISTRIBUTED else lambda: False


def has_other_processes() -> bool:
    """Return whether this process belongs to a process group of several."""
    return is_distributed() and torch.distributed.get_world_size() > 1


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def fsdp1_refusal(what: str) -> str:
    """Return the error text for a model in FullyShardedDataParallel."""
    return (
        f"{what} is wrapped in FullyShardedDataParallel (FSDP1), which puts flat parameters of its own in the places "
        "of the model's, before or after mpinit.initialize: use FSDP2, torch.distributed.fsdp.fully_shard(model), then "
        "make the optimizer, then call mpinit.initialize"
    )


def fsdp2_refusal(what: str) -> str:
    """Return the error text for a module that ``fully_shard`` was called on, with ``master_weights="model"``."""
    return (
        f"fully_shard was called on {what}: FSDP2 puts the gathered parameters on modules inside forward, where "
        'master_weights="model" puts its casts. Use master_weights=True (O2, O5), where FSDP2\'s own float32 shards '
        "are the masters, and call fully_shard before mpinit.initialize"
    )


def is_managed_by_fsdp(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on a module."""
    return hasattr(type(module), "_get_fsdp_state")


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that is in this process: all of it, unless it is sharded."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def dense_view(gradient: torch.Tensor) -> torch.Tensor:
    """Return a real, dense tensor with a gradient's numbers, in the same memory.

    For a complex gradient it is the real view, for a DTensor the local part. For a sparse gradient it is the tensor of
    values; if the gradient is not coalesced, several of these belong to one element.
    """
    gradient = local(gradient)
    if gradient.is_sparse:
        gradient = gradient._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def dense_views(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the :func:`dense_view` of each gradient."""
    return gradients if not gradients or are_alike(gradients) else [dense_view(gradient) for gradient in gradients]


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same part as :func:`local`, detached."""
    part: torch.Tensor = _TENSOR_DETACH(getattr(tensor, "_local_tensor", tensor))
    return part


def sharded_as(part: torch.Tensor, like: Any) -> torch.Tensor:
    """Wrap this process's part of a tensor like another DTensor; return it as it is if the other is not sharded."""
    if not is_sharded(like):
        return part
    spec = copy.copy(like._spec)
    spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
    made: torch.Tensor = type(like)(part, spec, requires_grad=False)
    return made


def set_all_local_data(tensors: list[Any], parts: list[torch.Tensor], are_sharded: bool) -> None:
    """Replace the memory of tensors' parts in this process by other memory of the same shapes and dtypes."""
    if not are_sharded:
        consume(map(_TENSOR_DATA.__set__, tensors, parts))
        return
    for tensor, part in zip(tensors, parts, strict=True):
        if is_sharded(tensor):
            tensor._local_tensor = part
        else:
            _TENSOR_DATA.__set__(tensor, part)


def redistribute_like(tensor: Any, like: Any) -> torch.Tensor:
    """Redistribute a tensor to the placements of another."""
    if is_sharded(tensor) and tensor.placements != like.placements:
        moved: torch.Tensor = tensor.redistribute(placements=like.placements)
        return moved
    assert isinstance(tensor, torch.Tensor)
    return tensor


def set_data(tensor: Any, values: Any) -> None:
    """Set ``tensor.data = values`` for any class of tensor, and the inner part of a DTensor with it."""
    _TENSOR_DATA.__set__(tensor, values)
    if type(values) is not torch.Tensor and is_sharded(values):
        # torch changes the wrapper only.
        tensor._local_tensor, tensor._spec = values._local_tensor, values._spec


def replace_data(tensor: torch.Tensor, values: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Replace a tensor's data by data of another dtype, and cast its gradient, because torch requires equal dtypes."""
    tensor.grad = None
    set_data(tensor, values)
    if gradient is not None:
        tensor.grad = gradient.to(values.dtype)


def groups_of_fsdp(modules: Collection[nn.Module]) -> list[Any]:
    """List the groups of parameters that FSDP gathers together."""
    groups: list[Any] = []
    if not any(hasattr(kind, "_get_fsdp_state") for kind in {*map(type, modules)}):
        return groups
    for module in modules:
        if is_managed_by_fsdp(module):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            # In torch 2.11 a module has one group or None. From 2.12 on it has a list.
            if hasattr(state, "_fsdp_param_groups"):
                groups += state._fsdp_param_groups
            elif state._fsdp_param_group is not None:
                groups.append(state._fsdp_param_group)
    return groups


def model_parameters(models: Sequence[nn.Module]) -> dict[nn.Parameter, None]:
    """Return the models' parameters, each once; for a parameter that FSDP has gathered at the moment, its shard.

    FSDP may keep parameters gathered from a forward until the backward pass has ended. Until then the modules have
    other parameters than the optimizer, and the unreduced gradients are in these.
    """
    modules = modules_of(*models)
    found = {p: None for module in modules for p in module._parameters.values() if p is not None}
    if not is_distributed():
        return found
    groups = groups_of_fsdp(modules)
    entries = [entry for group in groups for entry in group.fsdp_params if hasattr(entry, "_unsharded_param")]
    shards = {id(entry._unsharded_param): entry.sharded_param for entry in entries}
    return dict.fromkeys(shards.get(id(parameter), parameter) for parameter in found)


def keep_gradients(groups: Iterable[Any]) -> bool:
    """Return whether FSDP keeps gradients for a later reduction, or was told to keep those of the next pass.

    ``set_requires_gradient_sync(False)`` keeps whole ones, ``set_requires_all_reduce(False)`` sums over a part of the
    ranks. They are in no ``weight.grad``.
    """
    for group in groups:
        if not (group.reduce_grads and group.all_reduce_grads) or group._partial_reduce_output is not None:
            return True
        for entry in group.fsdp_params:
            whole = getattr(entry, "_unsharded_param", None)
            if entry.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                return True
    return False


def reshard(modules: Collection[nn.Module]) -> bool:
    """Let FSDP put the shards back on modules whose weights a forward has gathered, even if that forward failed.

    Returns:
        Whether FSDP manages any of the modules.
    """
    groups = groups_of_fsdp(modules)
    for group in groups:
        # After an exception in a forward FSDP's state is still FORWARD, in which reshard() may keep weights gathered.
        group._training_state = type(group._training_state).IDLE
        group.reshard()
    return bool(groups)


def replaced_since(named: Sequence[tuple[str, nn.Parameter]], stepped: Iterable[torch.Tensor]) -> str:
    """Return the error text if parameters were replaced after an optimizer was made from them; "" if none were.

    ``fully_shard``, ``parallelize_module`` and FSDP1 replace a module's parameters. ``to_empty`` replaces parameters of
    the meta device. Parameters that are in no model, as those of a loss function, do not count as replaced.
    """
    present, known = {id(parameter) for _, parameter in named}, {id(parameter): parameter for parameter in stepped}
    gone = [parameter for key, parameter in known.items() if key not in present]
    empty = {parameter.shape for parameter in gone if parameter.is_meta}
    whole = {parameter.shape for parameter in gone if not is_sharded(parameter)} if is_distributed() else set()
    names = [name for name, parameter in named if not parameter.is_meta and parameter.shape in empty]
    what = "on the meta device, and to_empty() has put another parameter"
    if not names and whole:
        what = "whole, and fully_shard (or parallelize_module) has put a shard"
        others = [(name, parameter) for name, parameter in named if id(parameter) not in known]
        names = [
            name
            for name, parameter in others
            if (is_sharded(parameter) and parameter.shape in whole) or type(parameter).__name__ == "FlatParameter"
        ]
    if not names:
        return ""
    return (
        f"the optimizer was made, or initialised, while {names[0]!r} was {what} in its place since: nothing would "
        "be trained. Call to_empty() and load a state, or shard the model, first, make the optimizer from the "
        "parameters that the model has then, and call mpinit.initialize last"
    )


def _gathers_each(group: Any) -> bool:
    """Return whether FSDP can gather each float32 shard of a group in a dtype of its own, as from torch 2.15 on."""
    return all(
        entry.sharded_param.dtype is torch.float32 and hasattr(entry.mp_policy, "param_dtype_override_fn")
        for entry in group.fsdp_params
    )


def check_groups(
    modules: Collection[nn.Module], targets: Mapping[torch.Tensor, torch.dtype], keeps_shards: bool
) -> None:
    """Refuse groups of several dtypes, because FSDP gathers a group's parameters in one buffer.

    Args:
        keeps_shards: whether float32 shards stay float32, so that only their gathered copies have several dtypes.
    """
    for group in groups_of_fsdp(modules):
        trained = [entry for entry in group.fsdp_params if entry.sharded_param.requires_grad]
        wanted = [targets.get(entry.sharded_param, entry.sharded_param.dtype) for entry in trained]
        names = [entry._param_fqn or entry._module_info.param_name for entry in trained]
        found = dict(zip(reversed(wanted), reversed(names), strict=True))
        if len(found) > 1 and not (keeps_shards and _gathers_each(group)):
            both = " and ".join(f"{name!r} in {dtype}" for dtype, name in reversed(found.items()))
            raise ValueError(
                f"fully_shard has put parameters into one group that are to be in different dtypes ({both}). Before "
                "torch 2.15, and with other than full masters, FSDP gathers a group in one dtype. Call fully_shard on "
                "each module that stays float32 (BatchNorm, keep_fp32) before it is called on the model, or pass "
                "keep_batchnorm_fp32=False"
            )
        for entry, dtype, name in zip(trained, wanted, names, strict=True):
            # Since torch 2.15 a policy can name a type for each parameter.
            asked = entry.mp_policy.param_dtype
            if asked is not None and asked is not dtype:
                raise ValueError(
                    f"fully_shard was called with MixedPrecisionPolicy(param_dtype={asked}), and {name!r} is to "
                    f"compute in {dtype}: call fully_shard without mp_policy, which mpinit.initialize sets, or choose "
                    f"cast_model_type={asked}, or opt_level='O1'"
                )


def gathered_dtypes(
    modules: Collection[nn.Module], targets: Mapping[torch.Tensor, torch.dtype]
) -> dict[torch.Tensor, torch.dtype]:
    """Map float32 shards to the 16-bit dtype in which FSDP can gather them for a forward."""
    found: dict[torch.Tensor, torch.dtype] = {}
    for group in groups_of_fsdp(modules):
        parameters = [entry.sharded_param for entry in group.fsdp_params]
        wanted = {targets.get(parameter) for parameter in parameters}
        is_one = len(wanted) == 1 and all(parameter.dtype is torch.float32 for parameter in parameters)
        if is_one or _gathers_each(group):
            found |= {p: targets[p] for p in parameters if p in targets and targets[p] is not torch.float32}
    return found


def gather_in(modules: Collection[nn.Module], dtypes: Mapping[torch.Tensor, torch.dtype]) -> Callable[[], None]:
    """Let FSDP gather float32 shards in 16 bit, and reduce gradients in float32 unless its policy names a dtype.

    The change takes effect when :func:`rebuild_groups` is called. So does the undo, which is returned.
    """
    before: list[tuple[Any, Any]] = []
    for group in groups_of_fsdp(modules):
        wanted = {entry: dtypes.get(entry.sharded_param) for entry in group.fsdp_params}
        narrow = next(filter(None, wanted.values()), None)
        # Up to torch 2.13 a group has a policy beside those of its parameters, which all have its dtype.
        holders = wanted | ({group: narrow} if hasattr(group, "mp_policy") else {})
        for holder, dtype in holders.items() if narrow is not None else ():
            policy = holder.mp_policy
            before.append((holder, policy))
            # Named, because the default of torch 2.15 is not that of 2.13.
            holder.mp_policy = replace(policy, param_dtype=dtype, reduce_dtype=policy.reduce_dtype or torch.float32)

    def undo() -> None:
        for holder, policy in before:
            holder.mp_policy = policy

    return undo


def rebuild_groups(modules: Collection[nn.Module], known: Collection[int] | None = None) -> None:
    """Let FSDP read its parameters again after a cast: it keeps their data, and buffers of their old dtype.

    Args:
        modules: the modules that FSDP has sharded.
        known: only groups that have parameters with these ids; None: all.
    """
    for group in groups_of_fsdp(modules):
        if known is not None and not any(id(entry.sharded_param) in known for entry in group.fsdp_params):
            continue
        for entry in group.fsdp_params:
            entry.reset_sharded_param()
            entry.all_gather_outputs.clear()
            vars(entry).pop("_unsharded_param", None)
        group._init_mp_dtypes()
