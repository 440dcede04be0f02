"""The plan: the decisions about models, functions and optimizers that follow from the properties.

Inert and printable. All layers below read a Plan, so that a decision is made once.
"""

import enum
import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from .loss_scale import MOST_SKIPS, DynamicLossScale, LossScale
from .properties import KeptModules, Properties

KeepInputPredicate = Callable[[str, Any], bool]
CastPolicy = Literal["torch", "apex"]


class MasterWeightsMode(enum.Enum):
    """The way in which float32 masters of 16-bit weights are stored, as ``master_weights`` has it."""

    NONE = None
    FULL = True
    SPLIT = "split"
    IN_MODEL = "model"


@dataclass(frozen=True)
class KeepRule:
    """A choice of modules, such as those that stay float32 in a 16-bit model.

    Attributes:
        entries: types of modules, patterns of dotted names, or predicates (dotted name, module) -> bool.
        names: the patterns among these. One that names no module is for parameters and buffers.
    """

    entries: tuple[KeptModules, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple([entry for entry in self.entries if isinstance(entry, str)])

    def keeps(self, name: str, module: torch.nn.Module) -> bool:
        """Return whether a module of that dotted name is chosen."""
        for entry in self.entries:
            if isinstance(entry, str):
                is_kept = fnmatch.fnmatchcase(name, entry)
            elif isinstance(entry, type):
                is_kept = isinstance(module, entry)
            else:
                is_kept = bool(entry(name, module))
            if is_kept:
                return True
        return False


@dataclass(frozen=True)
class Plan:
    """The resolved configuration: the properties as they were passed, and the decisions that follow from them.

    Attributes:
        properties: the properties themselves.
        cast_model: whether parameters, buffers and inputs are cast at all.
        model_dtype: the dtype that they are cast to (float32 where they are not).
        output_dtype: the dtype that floating outputs are cast to; None: they are not cast.
        keeps: the rule by which modules stay float32; without entries where no weight is 16-bit.
        keep_inputs: (argument's name, value) -> whether the argument is passed as it is; one True is enough.
        computes: the rule by which modules compute in float32, whatever their weights are stored in.
        function_dtype: the 16-bit dtype that patched torch functions run in; None: no functions are patched.
        cast_policy: the functions that O1 casts: those of torch.autocast, or those of apex.
        masters: how float32 masters are kept.
        loss_scale: the number that losses are multiplied by, or the rule by which it moves.
    """

    properties: Properties
    cast_model: bool
    model_dtype: torch.dtype
    output_dtype: torch.dtype | None
    keeps: KeepRule
    keep_inputs: tuple[KeepInputPredicate, ...]
    computes: KeepRule
    function_dtype: torch.dtype | None
    cast_policy: CastPolicy
    masters: MasterWeightsMode
    loss_scale: LossScale

    @property
    def is_dynamic(self) -> bool:
        """Return whether the loss scale moves."""
        return isinstance(self.loss_scale, DynamicLossScale)

    @property
    def skips(self) -> bool:
        """Return whether a step whose gradients contain inf or nan is skipped."""
        return self.is_dynamic or self.properties.skip_nonfinite

    @property
    def max_consecutive_skips(self) -> int:
        """Return the number of skipped steps in a row after which ``step()`` raises."""
        return self.loss_scale.max_consecutive_skips if isinstance(self.loss_scale, DynamicLossScale) else MOST_SKIPS

    @property
    def makes_masters(self) -> bool:
        """Return whether trained weights have masters beside them."""
        return self.masters in (MasterWeightsMode.FULL, MasterWeightsMode.SPLIT)


def make_plan(props: Properties, cast_policy: CastPolicy = "torch") -> Plan:
    """Resolve Properties into a Plan."""
    casts_weights = props.casts_to_16_bit and not props.patch_torch_functions
    batchnorm: tuple[KeptModules, ...] = (_BatchNorm,) if props.keep_batchnorm_fp32 else ()
    casts_outputs = props.cast_model_type is not None or props.patch_torch_functions == "model"
    return Plan(
        properties=props,
        cast_model=props.cast_model_type is not None,
        model_dtype=props.cast_model_type or torch.float32,
        output_dtype=props.cast_model_outputs or (torch.float32 if casts_outputs else None),
        keeps=KeepRule((*props.keep_fp32, *batchnorm) if casts_weights else ()),
        keep_inputs=tuple([partial(_is_named, e) if isinstance(e, str) else e for e in props.keep_inputs]),
        computes=KeepRule(props.compute_fp32 if props.lower_precision_type is not None else ()),
        function_dtype=props.patch_torch_functions_type if props.patch_torch_functions else None,
        cast_policy=cast_policy,
        masters=MasterWeightsMode(props.master_weights or None) if casts_weights else MasterWeightsMode.NONE,
        loss_scale=props.scaling(),
    )


def _is_named(pattern: str, name: str, value: Any) -> bool:
    # Equality first, because torch.compile warns about functools.lru_cache, which fnmatch uses.
    return name == pattern or (not pattern.isidentifier() and fnmatch.fnmatchcase(name, pattern))
