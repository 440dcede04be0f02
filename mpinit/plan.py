"""The plan: the decisions about models, functions and optimizers that follow from the properties.

Inert and printable. All layers below read a Plan, so that a decision is made once.
"""

import enum
import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from .settings.properties import KeepFloat32, Properties
from .settings.recipes import RECIPES
from .settings.spellings import SMALLEST_SCALE

KeepInputPredicate = Callable[[str, Any], bool]


class MasterWeightsMode(enum.Enum):
    """The way in which float32 masters of 16-bit weights are stored."""

    NONE = enum.auto()
    FULL = enum.auto()
    SPLIT = enum.auto()
    IN_MODEL = enum.auto()


_MASTERS: Final[dict[bool | str | None, MasterWeightsMode]] = {
    None: MasterWeightsMode.NONE,
    False: MasterWeightsMode.NONE,
    True: MasterWeightsMode.FULL,
    "split": MasterWeightsMode.SPLIT,
    "model": MasterWeightsMode.IN_MODEL,
}


@dataclass(frozen=True)
class KeepRule:
    """The rule by which modules stay float32 in a 16-bit model.

    Attributes:
        entries: types of modules, patterns of dotted names, or predicates (dotted name, module) -> bool.
        names: the patterns among these. One that names no module is for parameters and buffers.
    """

    entries: tuple[KeepFloat32, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple([entry for entry in self.entries if isinstance(entry, str)])

    def keeps(self, name: str, module: torch.nn.Module) -> bool:
        """Return whether a module of that dotted name stays float32."""
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
class ScalingRule:
    """The rule by which a loss scale moves, as in :class:`Properties`; static scaling is a rule that never moves.

    Attributes:
        dynamic: whether the scale moves at all.
        skips_nonfinite: whether steps with inf or nan among the gradients are skipped also where the scale is static.
        may_wait: whether that may cost a device sync.
    """

    dynamic: bool
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    min_scale: float
    max_scale: float
    max_consecutive_skips: int
    skips_nonfinite: bool = False
    may_wait: bool = False

    @property
    def skips(self) -> bool:
        return self.dynamic or self.skips_nonfinite


@dataclass(frozen=True)
class Plan:
    """The resolved configuration: the properties as they were passed, and the decisions that follow from them.

    Attributes:
        properties: the properties themselves.
        cast_model: whether parameters, buffers and inputs are cast at all.
        model_dtype: the dtype that they are cast to (float32 where they are not).
        cast_outputs: whether floating outputs are cast.
        output_dtype: the dtype that outputs are cast to.
        keeps: the rule by which modules stay float32; without entries where no weight is 16-bit.
        keep_inputs: (argument's name, value) -> whether the argument is passed as it is; one True is enough.
        function_dtype: the 16-bit dtype that patched torch functions run in.
        masters: how float32 masters are kept.
        scaling: the rule the loss scales follow.
    """

    properties: Properties
    cast_model: bool
    model_dtype: torch.dtype
    cast_outputs: bool
    output_dtype: torch.dtype
    keeps: KeepRule
    keep_inputs: tuple[KeepInputPredicate, ...]
    function_dtype: torch.dtype
    masters: MasterWeightsMode
    scaling: ScalingRule

    @property
    def makes_masters(self) -> bool:
        """Return whether trained weights have masters beside them."""
        return self.masters in (MasterWeightsMode.FULL, MasterWeightsMode.SPLIT)

    @property
    def needs_no_patched_step(self) -> bool:
        """Return whether losses, gradients and steps are those of plain torch, as at O0, so that no step is patched."""
        is_scaled = self.scaling.skips or self.scaling.init_scale != 1.0
        changes = self.properties.optimizer_state != "float32" or self.properties.patch_torch_functions
        return self.masters is MasterWeightsMode.NONE and not (is_scaled or changes)


def make_plan(props: Properties) -> Plan:
    """Resolve Properties into a Plan."""
    lower = props.lower_precision_type
    casts_weights = lower is not None and not props.patch_torch_functions
    batchnorm: tuple[KeepFloat32, ...] = (_BatchNorm,) if props.keep_batchnorm_fp32 else ()
    model_only = props.patch_torch_functions and props.cast_scope == "model"
    return Plan(
        properties=props,
        cast_model=props.cast_model_type is not None,
        model_dtype=props.cast_model_type or torch.float32,
        cast_outputs=props.cast_model_type is not None or props.cast_model_outputs is not None or model_only,
        output_dtype=props.cast_model_outputs or torch.float32,
        keeps=KeepRule((*map(_resolved, props.keep_fp32), *batchnorm) if casts_weights else ()),
        keep_inputs=tuple([partial(_is_named, e) if isinstance(e, str) else e for e in props.keep_inputs]),
        function_dtype=props.patch_torch_functions_type or torch.float16,
        masters=_MASTERS[props.master_weights] if casts_weights else MasterWeightsMode.NONE,
        scaling=_scaling_rule(props),
    )


def _scaling_rule(props: Properties) -> ScalingRule:
    dynamic = props.loss_scale == "dynamic"
    low = props.min_loss_scale if props.min_loss_scale is not None else SMALLEST_SCALE
    by_default = props.lower_precision_type is not None
    first = min(max(props.init_loss_scale, low), props.max_loss_scale) if dynamic else float(props.loss_scale)
    return ScalingRule(
        dynamic=dynamic,
        init_scale=first,
        growth_factor=props.growth_factor,
        backoff_factor=props.backoff_factor,
        growth_interval=props.growth_interval,
        hysteresis=props.hysteresis,
        min_scale=low,
        max_scale=props.max_loss_scale,
        max_consecutive_skips=props.max_consecutive_skips,
        skips_nonfinite=by_default if props.skip_nonfinite is None else props.skip_nonfinite,
        may_wait=props.skip_nonfinite is True,
    )


def _resolved(entry: KeepFloat32) -> KeepFloat32:
    """Return the rule that a recipe's name means; any other entry as it is."""
    return RECIPES.get(entry, entry) if isinstance(entry, str) else entry


def _is_named(pattern: str, name: str, value: Any) -> bool:
    # Equality first, because torch.compile warns about functools.lru_cache, which fnmatch uses.
    return name == pattern or (not pattern.isidentifier() and fnmatch.fnmatchcase(name, pattern))
