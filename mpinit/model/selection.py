"""The selection of tensors that are cast and of modules that stay float32; nothing is changed here."""

import fnmatch
import re
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.loss import _Loss
from torch.nn.modules.module import _forward_unimplemented
from torch.nn.utils.parametrize import ParametrizationList

from ..autocast.encoder_fast_path import is_bypassed
from ..basics.dtypes import LOWER_PRECISION, is_lower_precision
from ..basics.modules import ModelIndex, dotted, modules_of
from ..config.plan import KeepRule, MasterWeightsMode, Plan
from ..distributed.sharding import check_groups, gathered_dtypes
from .entry_points import entry_points

_NUMEL: Final[Any] = torch.Tensor.numel
# Attributes of classes, which objects may have as well.
_DECLARE_FLOAT32: Final = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


@dataclass(frozen=True, eq=False)
class Selection:
    """The tensors and modules of models that a plan changes, computed once by :func:`select`.

    Attributes:
        index: the modules and tensors of the models.
        kept: the topmost modules that stay float32 -> their dotted names. Their submodules stay float32 too.
        targets: floating parameter or buffer -> the dtype that it gets, in the models' order. Empty if the plan casts
            no model. With ``master_weights="model"`` parameters that are 16-bit only inside forwards are not in it.
        has_16_bit: whether any parameter or buffer is 16-bit after the casts, or inside forwards.
        float32_modules: all modules that stay float32: those in ``kept`` and their submodules.
        float32_parameters: parameters of other modules that stay float32: ``keep_fp32`` or the library names them, or
            they are float32 in a model that comes in 16 bits.
        declared: the names of tensors that stay float32 because their library names them.
        computes: all modules that compute in float32 whatever their weights are stored in, with their submodules.
        gathered: FSDP2 parameter (a float32 shard) -> the 16-bit dtype of its all-gather.
        changes: the tensors whose dtype changes.
        clamped: the tensors without a master whose finite values overflow in that dtype; set by the checks.
        came_in_16_bit: parameter or buffer that is 16-bit already -> its first dotted name.
        parts: submodules whose forward is patched -> the dtype that it computes in: those that have tensors of that
            dtype, and those in ``kept``. Empty if the plan makes no weight 16-bit.
        entry_points: modules with the names of their methods that users call.
        bypasses_kept: whether a fast path of torch computes without calling modules in ``kept``.
    """

    index: ModelIndex
    kept: Mapping[nn.Module, str]
    targets: Mapping[torch.Tensor, torch.dtype]
    has_16_bit: bool
    float32_modules: Collection[nn.Module]
    float32_parameters: Sequence[torch.Tensor]
    declared: Sequence[str]
    computes: Collection[nn.Module]
    gathered: Mapping[torch.Tensor, torch.dtype]
    changes: Sequence[torch.Tensor]
    came_in_16_bit: Mapping[torch.Tensor, str]
    parts: Mapping[nn.Module, torch.dtype]
    entry_points: Sequence[tuple[nn.Module, str]]
    bypasses_kept: bool
    clamped: Container[torch.Tensor] = ()


def select(index: ModelIndex, plan: Plan) -> Selection:
    """Find the tensors and modules that a plan changes in the models of an index."""
    tops, float32_modules = _kept_modules(index, plan.keeps)
    kept = {tensor for module in float32_modules for _, tensor in index.own[module]}
    if kept:
        _check_not_shared(index, float32_modules, kept)
    in_modules = set(kept)
    kept |= _kept_by_name(index, plan.keeps.names)
    declared = declared_float32(index, plan.model_dtype) if plan.cast_model else {}
    kept.update(declared.values())
    tensors = [tensor for module in index.names for _, tensor in index.own[module]]
    targets: dict[torch.Tensor, torch.dtype] = {}
    float32_parameters: list[torch.Tensor] = []
    if plan.cast_model:
        comes_in_16_bits = _comes_in(tensors, plan.model_dtype)
        for tensor in tensors:
            # float64 and complex tensors stay: no level is about them.
            if tensor.dtype in LOWER_PRECISION or tensor.dtype is torch.float32:
                is_meant = comes_in_16_bits and tensor.dtype is torch.float32
                targets[tensor] = torch.float32 if is_meant or (kept and tensor in kept) else plan.model_dtype
        float32_parameters = [
            tensor
            for tensor, dtype in targets.items()
            if dtype is torch.float32 and is_parameter(tensor) and tensor not in in_modules
        ]
        if plan.masters is MasterWeightsMode.IN_MODEL:
            inside = {t for t, dtype in targets.items() if is_lower_precision(dtype) and is_parameter(t)}
            targets = {tensor: dtype for tensor, dtype in targets.items() if tensor not in inside}
    keeps_shards = plan.masters is MasterWeightsMode.FULL
    check_groups(index.names, targets, keeps_shards)
    gathered = gathered_dtypes(index.names, targets) if keeps_shards else {}
    targets |= dict.fromkeys(gathered, torch.float32)
    dtypes = targets.values() if plan.cast_model else [tensor.dtype for tensor in tensors]
    came_in_16_bit: dict[torch.Tensor, str] = {}
    for name, tensor in (*index.parameters, *index.buffers):
        if tensor.dtype in LOWER_PRECISION:
            came_in_16_bit.setdefault(tensor, name)
    return Selection(
        index=index,
        kept=tops,
        targets=targets,
        has_16_bit=plan.masters is MasterWeightsMode.IN_MODEL or not {*LOWER_PRECISION}.isdisjoint(dtypes),
        float32_modules=frozenset(float32_modules),
        float32_parameters=float32_parameters,
        declared=list(declared),
        computes=_kept_modules(index, plan.computes)[1],
        gathered=gathered,
        changes=[tensor for tensor, dtype in targets.items() if tensor.dtype != dtype],
        came_in_16_bit=came_in_16_bit,
        parts=_parts(index, tops, float32_modules, plan),
        entry_points=entry_points(index.models, plan.properties.entry_points),
        bypasses_kept=bool(tops) and is_bypassed(tops, index.names),
    )


def _comes_in(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether most of a model's numbers are in a 16-bit dtype already.

    What such a model has in float32, a table, a norm or an adapter, is meant so: its own code casts.
    """
    if not is_lower_precision(dtype):
        return False
    distinct = [tensor for tensor in {id(tensor): tensor for tensor in tensors}.values() if tensor.is_floating_point()]
    narrow = [tensor for tensor in distinct if tensor.dtype is dtype]
    return bool(narrow) and 2 * sum(map(_NUMEL, narrow)) > sum(map(_NUMEL, distinct))


def declared_float32(index: ModelIndex, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Find the tensors that modules of transformers and diffusers list as float32, by their names.

    In transformers ``_keep_in_fp32_modules`` is for float16 alone, and its ``_strict`` form for both dtypes. In
    diffusers the first is for both.
    """
    found: dict[str, torch.Tensor] = {}
    kinds = {kind for kind in set(map(type, index.names)) if any(hasattr(kind, name) for name in _DECLARE_FLOAT32)}
    for path, module in index.named_modules if is_lower_precision(dtype) else ():
        if type(module) not in kinds and not any(name in vars(module) for name in _DECLARE_FLOAT32):
            continue
        listed, strictly = (getattr(module, name, None) or () for name in _DECLARE_FLOAT32)
        asked = set(strictly)
        if dtype is torch.float16 or type(module).__module__.startswith("diffusers."):
            asked |= {listed} if isinstance(listed, str) else set(listed)
        if not asked:
            continue
        prefix = f"{path}." if path else ""
        pattern = re.compile(rf"(^|\.)({'|'.join(sorted(asked))})(\.|$)")
        for name, tensor in index.named_tensors():
            if name.startswith(prefix) and tensor.is_floating_point() and pattern.search(name.removeprefix(prefix)):
                found[name] = tensor
    return found


def _kept_by_name(index: ModelIndex, patterns: Sequence[str]) -> set[torch.Tensor]:
    """Find the tensors that patterns of ``keep_fp32`` name; patterns that name a module are not used here."""
    modules = [name for name, _ in index.paths] if patterns else []
    own = [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in modules)]
    if not own:
        return set()
    return {t for name, t in index.named_tensors() if any(fnmatch.fnmatchcase(name, pattern) for pattern in own)}


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a module is a parameter or requires gradients; False: it is a buffer."""
    return isinstance(tensor, nn.Parameter) or tensor.requires_grad


def _kept_modules(index: ModelIndex, keeps: KeepRule) -> tuple[dict[nn.Module, str], dict[nn.Module, None]]:
    """Find the topmost modules that stay float32, with their names, and all of these with their submodules.

    A submodule of one that stays float32 is not looked up by itself.
    """
    tops: dict[nn.Module, str] = {}
    kept: dict[nn.Module, None] = {}
    for module, name in index.names.items() if keeps.entries else ():
        is_kept = index.first_parents[module] in kept
        if not is_kept:
            is_kept = keeps.keeps(name, module)
            if not is_kept and isinstance(module, nn.MultiheadAttention):
                # Attention reads the weights of its output layer without calling it: both are in one dtype.
                output = module._modules.get("out_proj")
                is_kept = output is not None and keeps.keeps(dotted(name, "out_proj"), output)
            if is_kept:
                tops[module] = name
        if is_kept:
            kept[module] = None
    if index.shares_modules:
        for top in tops:
            kept |= dict.fromkeys(modules_of(top))
    return tops, kept


def _check_not_shared(index: ModelIndex, float32_modules: Container[nn.Module], kept: set[torch.Tensor]) -> None:
    for module, name in index.names.items():
        if module in float32_modules:
            continue
        shared = [own for own, tensor in module._parameters.items() if tensor in kept]
        if shared:
            raise ValueError(
                f"parameter {dotted(name, shared[0])!r} is shared with a module that keep_fp32 leaves in float32, and "
                "cannot be in two dtypes at once: name both modules in keep_fp32, or neither"
            )


def _parts(
    index: ModelIndex, tops: Container[nn.Module], float32_modules: Container[nn.Module], plan: Plan
) -> dict[nn.Module, torch.dtype]:
    if not (plan.cast_model and is_lower_precision(plan.model_dtype)):
        return {}
    with_tensors = _with_tensors(index, float32_modules)
    hidden = {below for module in index.names if isinstance(module, _CALLED_ANYWHERE) for below in modules_of(module)}
    roots, parts = set(index.models), {}
    for module in index.names:
        float32 = module in float32_modules
        is_called = module in with_tensors and module not in hidden and has_forward(module)
        if module in roots or not (is_called or module in tops):
            continue
        # With master_weights="model" a BatchNorm that is cast is patched: called from outside it has float32 weights.
        mixes = float32 or plan.masters is not MasterWeightsMode.IN_MODEL
        if not (mixes and isinstance(module, _BatchNorm) and _mixes_dtypes_itself(module)):
            parts[module] = torch.float32 if float32 else plan.model_dtype
    return parts


def _with_tensors(index: ModelIndex, float32_modules: Container[nn.Module]) -> set[nn.Module]:
    """Find the modules that have a floating tensor themselves, or in a submodule of the same dtype."""
    pending = [module for module, own in index.own.items() for _, tensor in own if tensor.is_floating_point()]
    found = set(pending)
    while pending:
        module = pending.pop()
        for parent in index.parents.get(module, ()):
            if parent not in found and (parent in float32_modules) is (module in float32_modules):
                found.add(parent)
                pending.append(parent)
    return found


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called and its forward patched."""
    return "forward" in vars(module) or type(module).forward is not _forward_unimplemented


def _mixes_dtypes_itself(module: nn.Module) -> bool:
    """Return whether a BatchNorm's kernel accepts 16-bit inputs with float32 parameters and returns the inputs' dtype.

    torch's own BatchNorms do, in training and evaluation. Casts around them would need memory without an effect.
    """
    return type(module).forward in _MIXED_FORWARDS and "forward" not in vars(module)


_MIXED_FORWARDS: Final = (_BatchNorm.forward, nn.SyncBatchNorm.forward)

# Modules whose forward is not patched. A parametrization runs wherever its weight is read, and returns the weight's
# dtype. A loss would get rounded targets: for a loss with 16-bit weights torch's error about the dtypes is better.
_CALLED_ANYWHERE: Final = (ParametrizationList, _Loss)
