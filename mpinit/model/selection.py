"""Which tensors of the models are cast, and which modules stay float32: reads, never changes."""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.loss import _Loss
from torch.nn.modules.module import _forward_unimplemented
from torch.nn.utils.parametrize import ParametrizationList

from ..basics.dtypes import is_lower_precision
from ..distributed.sharding import check_groups, gathered_dtypes, is_managed_by_fsdp
from ..plan import MasterWeightsMode, Plan


@dataclass(frozen=True, eq=False)
class Selection:
    """What a plan comes to on given models, computed once by :func:`select`.

    Attributes:
        kept: the topmost modules that stay float32, with their dotted names; everything below them does too.
        targets: every floating parameter and buffer -> the dtype it is to have, tied ones once, in the models' order.
            Empty where the plan casts no model. Without parameters that only forwards are to see in 16 bit.
        holds_16_bit: whether any parameter or buffer will be 16-bit once ``targets`` are cast, or inside forwards.
        float32_modules: all modules that stay float32: those in ``kept`` and those below them.
        gathered: float32 shards that FSDP gathers in 16 bit -> the type it gathers them in; no targets of a cast.
        parts: modules below the models -> the dtype their forward computes in, for those that hold tensors of that
            dtype or are in ``kept``. Empty where the plan makes no weight 16-bit.
    """

    models: tuple[nn.Module, ...]
    kept: Mapping[nn.Module, str]
    targets: Mapping[torch.Tensor, torch.dtype]
    holds_16_bit: bool
    float32_modules: frozenset[nn.Module]
    gathered: Mapping[torch.Tensor, torch.dtype]
    changes: Sequence[torch.Tensor]
    parts: Mapping[nn.Module, torch.dtype]


def select(models: Sequence[nn.Module], plan: Plan) -> Selection:
    """Find out what a plan comes to on ``models``."""
    walk = _Walk(plan)
    for model in models:
        walk.visit("", model, False)
    kept = {tensor for module in walk.kept_modules for tensor in own_tensors(module)}
    if kept:
        _check_not_shared(walk, kept)
    kept |= _kept_by_name(models, plan.kept_names)
    tensors = [tensor for module in walk.names for tensor in own_tensors(module)]
    targets: dict[torch.Tensor, torch.dtype] = {}
    if plan.cast_model:
        for tensor in tensors:
            if tensor.is_floating_point():
                targets[tensor] = torch.float32 if kept and tensor in kept else plan.model_dtype
        if plan.masters is MasterWeightsMode.IN_MODEL:
            inside = {t for t, dtype in targets.items() if is_lower_precision(dtype) and is_parameter(t)}
            targets = {tensor: dtype for tensor, dtype in targets.items() if tensor not in inside}
    is_sharded_by_fsdp = any(map(is_managed_by_fsdp, walk.names))
    if is_sharded_by_fsdp:
        check_groups(models, targets)
    gathered = gathered_dtypes(models, targets) if is_sharded_by_fsdp and plan.masters is MasterWeightsMode.FULL else {}
    targets |= dict.fromkeys(gathered, torch.float32)
    dtypes = targets.values() if plan.cast_model else (tensor.dtype for tensor in tensors)
    return Selection(
        tuple(models),
        walk.tops,
        targets,
        plan.masters is MasterWeightsMode.IN_MODEL or any(map(is_lower_precision, dtypes)),
        frozenset(walk.kept_modules),
        gathered,
        [tensor for tensor, dtype in targets.items() if tensor.dtype != dtype],
        _parts(models, walk, plan),
    )


def tensor_patterns(models: Sequence[nn.Module], patterns: Sequence[str]) -> list[str]:
    """Those of the patterns in ``keep_fp32`` that match no module, and so are meant for parameters and buffers."""
    names = [name for model in models for name, _ in model.named_modules(remove_duplicate=False)]
    return [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]


def named_tensors(models: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer under each of its dotted names, without the model's index."""
    for model in models:
        yield from model.named_parameters(remove_duplicate=False)
        yield from model.named_buffers(remove_duplicate=False)


def _kept_by_name(models: Sequence[nn.Module], patterns: Sequence[str]) -> set[torch.Tensor]:
    own = tensor_patterns(models, patterns) if patterns else []
    if not own:
        return set()
    return {t for name, t in named_tensors(models) if any(fnmatch.fnmatchcase(name, pattern) for pattern in own)}


def own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """A module's own parameters and buffers, not those of its children."""
    own: list[torch.Tensor] = [tensor for tensor in module._parameters.values() if tensor is not None]
    if module._buffers:
        own += [tensor for tensor in module._buffers.values() if tensor is not None]
    return own


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a module is one that is trained, and no buffer."""
    return isinstance(tensor, nn.Parameter) or tensor.requires_grad


class _Walk:
    """All modules with their first names, and which of them stay float32."""

    def __init__(self, plan: Plan) -> None:
        self._keeps = plan.keep_float32
        self.names: dict[nn.Module, str] = {}
        self.tops: dict[nn.Module, str] = {}
        self.kept_modules: set[nn.Module] = set()

    def _is_kept(self, name: str, module: nn.Module) -> bool:
        if self._keeps(name, module):
            return True
        # Attention reads the weights of its output layer without calling it: both are in one dtype.
        output = module._modules.get("out_proj") if isinstance(module, nn.MultiheadAttention) else None
        return output is not None and self._keeps(f"{name}.out_proj" if name else "out_proj", output)

    def visit(self, name: str, module: nn.Module, below_kept: bool) -> None:
        if module in (self.kept_modules if below_kept else self.names):
            return
        self.names.setdefault(module, name)
        if not below_kept and self._is_kept(name, module):
            self.tops[module] = name
            below_kept = True
        if below_kept:
            self.kept_modules.add(module)
        for child_name, child in module._modules.items():
            if child is not None:
                self.visit(f"{name}.{child_name}" if name else child_name, child, below_kept)


def _check_not_shared(walk: _Walk, kept: set[torch.Tensor]) -> None:
    for module, name in walk.names.items():
        if module in walk.kept_modules:
            continue
        shared = [own for own, tensor in module._parameters.items() if tensor in kept]
        if shared:
            where = f"{name}.{shared[0]}" if name else shared[0]
            raise ValueError(
                f"parameter {where!r} is shared with a module that keep_fp32 leaves in float32, and cannot be in "
                "two dtypes at once: name both modules in keep_fp32, or neither"
            )


def _parts(models: Sequence[nn.Module], walk: _Walk, plan: Plan) -> dict[nn.Module, torch.dtype]:
    if not (plan.cast_model and is_lower_precision(plan.model_dtype)):
        return {}
    held: dict[nn.Module, bool] = {}

    def holds(module: nn.Module, float32: bool) -> bool:
        """Whether a module, or one below it that computes in the same type, holds a floating tensor."""
        found = held.get(module)
        if found is None:
            found = held[module] = any(map(torch.is_floating_point, own_tensors(module))) or any(
                holds(child, float32)
                for child in module._modules.values()
                if child is not None and (child in walk.kept_modules) is float32
            )
        return found

    hidden = {below for module in walk.names if isinstance(module, _CALLED_ANYWHERE) for below in module.modules()}
    roots, parts = set(models), {}
    for module in walk.names:
        float32 = module in walk.kept_modules
        is_called = module not in hidden and holds(module, float32) and _has_forward(module)
        # A norm whose weights are float32 outside would give other bits where it is called from there.
        mixes = _mixes_dtypes_itself(module) and (float32 or plan.masters is not MasterWeightsMode.IN_MODEL)
        if module not in roots and (is_called or module in walk.tops) and not mixes:
            parts[module] = torch.float32 if float32 else plan.model_dtype
    return parts


def _has_forward(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return "forward" in vars(module) or type(module).forward is not _forward_unimplemented


def _mixes_dtypes_itself(module: nn.Module) -> bool:
    """Whether a module's kernel takes 16-bit inputs with float32 parameters and answers in the input's type.

    torch's own BatchNorms do, in training and evaluation: casting around them would cost memory for nothing.
    """
    return isinstance(module, _BatchNorm) and type(module).forward in _MIXED_FORWARDS and "forward" not in vars(module)


_MIXED_FORWARDS: Final = (_BatchNorm.forward, nn.SyncBatchNorm.forward)

# A parametrization runs whenever its weight is read, wherever that is, and gives the weight's own type. Targets given
# to a loss would be rounded: better that a loss with 16-bit weights says that they do not fit.
_CALLED_ANYWHERE: Final = (ParametrizationList, _Loss)
