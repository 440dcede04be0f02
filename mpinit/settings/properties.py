"""The table of properties: a frozen pydantic model with its rules across fields and its error texts.

This file is the only place that defines a property: ``keywords.py`` and the reference page are generated from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ..basics.dtypes import dtype_name, is_lower_precision
from . import spellings
from .spellings import DEFAULT_INIT_SCALE, DEFAULT_MAX_SCALE


@dataclass(frozen=True)
class AlsoAccepts:
    """A further type that a property accepts, as source code; it annotates the property."""

    type: str


_DTYPE_SCHEMA = WithJsonSchema(
    {"anyOf": [{"enum": ["float16", "bfloat16", "float32"], "type": "string"}, {"type": "null"}]}
)
OptionalDtype = Annotated[
    torch.dtype | None,
    BeforeValidator(spellings.parse_optional_dtype),
    PlainSerializer(lambda value: None if value is None else dtype_name(value), when_used="json"),
    _DTYPE_SCHEMA,
]
Boolean = Annotated[bool, BeforeValidator(spellings.parse_bool)]
OptionalBoolean = Annotated[bool | None, BeforeValidator(spellings.optional(spellings.parse_bool))]
MasterWeights = Annotated[bool | Literal["split", "model"] | None, BeforeValidator(spellings.parse_master_weights)]
OptimizerState = Annotated[spellings.OptimizerStateName, BeforeValidator(spellings.parse_optimizer_state)]
LossScale = Annotated[float | Literal["dynamic"], BeforeValidator(spellings.parse_loss_scale)]
Scale = Annotated[float, BeforeValidator(spellings.parse_scale)]
OptionalScale = Annotated[float | None, BeforeValidator(spellings.optional(spellings.parse_scale))]
Count = Annotated[int, BeforeValidator(lambda value: spellings.parse_whole_number(value, 1))]
Bytes = Annotated[int, BeforeValidator(lambda value: spellings.parse_whole_number(value, 4, 2**62))]
KeepFloat32 = type[torch.nn.Module] | str | Callable[[str, torch.nn.Module], bool]
KeepFloat32List = Annotated[tuple[KeepFloat32, ...], BeforeValidator(spellings.parse_keep_fp32)]
KeepInput = str | Callable[[str, Any], bool]
KeepInputs = Annotated[tuple[KeepInput, ...], BeforeValidator(spellings.parse_keep_inputs)]
EntryPoints = Annotated[tuple[str, ...], BeforeValidator(spellings.parse_entry_points)]


def is_override(name: str, value: Any) -> bool:
    """Return whether ``value`` sets the property ``name``.

    None never does. The string "None", which a command line may pass, sets a property that can be None, and no other.
    """
    can_be_nothing = name in Properties.model_fields and Properties.model_fields[name].default in (None, ())
    return value is not None and (can_be_nothing or not spellings.is_nothing(value))


class Properties(BaseModel):
    """The properties after validation: the five that a level sets, and all others.

    They are frozen. They serialise to JSON and back, with dtypes by name, unless ``keep_fp32`` or ``keep_inputs``
    has types or functions.

    Attributes:
        cast_model_type: dtype that the model's floating parameters, buffers and inputs are cast to; None: no cast. As
            a keyword, False means no cast, and None the level's value.
        patch_torch_functions: whether torch functions cast their arguments (O1).
        patch_torch_functions_type: the 16-bit dtype that these functions run in. Default float16.
        keep_batchnorm_fp32: whether BatchNorm stays float32 in a 16-bit model; None at O0 and O1, whose models are
            float32.
        master_weights: True: the optimizer steps float32 masters of 16-bit weights. "split": the same, bit for bit,
            stored as the bfloat16 weight and a 16-bit remainder. "model": the model's parameters stay float32, the
            optimizer steps them, and forwards use 16-bit casts of them. False or None: the optimizer steps the 16-bit
            weights. A weight is its master rounded to nearest: ties to even with True and "model", away from zero with
            "split".
        loss_scale: "dynamic", or a static number above 0.
        cast_model_outputs: dtype of the model's floating outputs. Default None: float32.
        keep_fp32: modules that stay float32: module types, dotted names (wildcards allowed) or predicates
            ``(name, module) -> bool``. A name that matches no module is a name of parameters or buffers. These tensors
            stay float32 in a 16-bit module, whose code must cast them. ``"@router_gates"``, ``"@rotary_tables"``,
            ``"@small_eps_norms"`` and ``"@final_heads"`` are recipes: docs/how-to/model.md.
        keep_inputs: arguments of the models' forwards and entry points that are not cast, such as a loss's targets:
            names (wildcards allowed) or predicates ``(name, value) -> bool``. Positional arguments have the names of
            the signature. A model with a lambda here cannot be pickled.
        entry_points: methods besides ``forward`` that you call from outside, such as "forward_features" or
            "backbone.forward_features". Their inputs and outputs are cast like those of ``forward``. "head.forward" of
            a module inside: its inputs are cast for callers inside of the model, too.
        cast_policy: "torch" (PyTorch's CUDA autocast lists on every device) or the stricter "apex". Default "torch".
        cast_scope: "thread": casts are on in the calling thread. "model": only inside initialised models' forward.
            Default "thread".
        allow_banned: run functions that the cast policy bans in float16. Default False.
        init_loss_scale: the first scale of dynamic scaling. Default 2**16.
        growth_factor: the scale is multiplied by this after ``growth_interval`` good steps. Default 2.
        backoff_factor: the scale is multiplied by this on overflow. Default 0.5.
        growth_interval: number of good steps before the scale grows. Default 2,000.
        hysteresis: the scale backs off at this many overflows. Default 1.
        min_loss_scale: lower limit of a dynamic scale. Default None: no limit.
        max_loss_scale: upper limit of a dynamic scale. Default 2**24.
        max_consecutive_skips: ``step()`` raises after this many skipped steps in a row. Default 64.
        skip_nonfinite: whether to skip a step whose gradients contain inf or nan, on all ranks, also without a dynamic
            loss scale. Weights, optimizer states and schedulers (``scheduler_step``) do not change. Default None: only
            if it costs no device sync: on a CPU and with fused optimizers, but not at O0. The third skip in a row
            warns, and ``max_consecutive_skips`` applies.
        optimizer_state: format of the optimizer's state between steps: "float32" (the optimizer's own), "bfloat16" or
            "int8" (1 byte per number, and 4 per 128 numbers), rounded stochastically. Only for optimizers that update
            each parameter by itself. Default "float32". See docs/explanation/optimizer-states.md.
        grad_dtype: dtype of gradients on 16-bit weights that have masters. torch.float32: from the first backward pass
            on, 2 bytes per parameter more with split masters. Default None: float32 with full masters. With split
            masters bfloat16 after one backward pass, and float32 when a second one is added before a step. In a process
            group they have the weights' dtype, as buckets of DistributedDataParallel do.
        reduce_dtype: torch.float32: DistributedDataParallel sums 16-bit gradients over ranks in float32, a bucket at a
            time, and rounds the mean once. This sends twice the bytes and needs one float32 bucket. Default None: in
            the gradients' dtype. For FSDP2, set ``MixedPrecisionPolicy(reduce_dtype=...)``.
        split_bucket_bytes: float32 bytes that ``master_weights="split"`` and ``optimizer_state`` materialise at a
            time. Default 64 MiB; on a CPU at most 16 MiB, because larger buckets are slower there.

    Example:
        >>> Properties(loss_scale="128.0").loss_scale
        128.0
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, ser_json_inf_nan="constants")

    cast_model_type: Annotated[OptionalDtype, AlsoAccepts("Literal[False]")] = None
    patch_torch_functions: Boolean = False
    patch_torch_functions_type: OptionalDtype = Field(default="float16", validate_default=True)
    keep_batchnorm_fp32: OptionalBoolean = None
    master_weights: MasterWeights = None
    loss_scale: LossScale = 1.0
    cast_model_outputs: OptionalDtype = None
    keep_fp32: KeepFloat32List = ()
    keep_inputs: KeepInputs = ()
    entry_points: EntryPoints = ()
    cast_policy: Literal["torch", "apex"] = "torch"
    cast_scope: Literal["thread", "model"] = "thread"
    allow_banned: Boolean = False
    init_loss_scale: Scale = DEFAULT_INIT_SCALE
    growth_factor: float = Field(default=2.0, gt=1.0, allow_inf_nan=False)
    backoff_factor: float = Field(default=0.5, gt=0.0, lt=1.0)
    growth_interval: Count = 2000
    hysteresis: Count = 1
    min_loss_scale: OptionalScale = None
    max_loss_scale: Scale = DEFAULT_MAX_SCALE
    max_consecutive_skips: Count = 64
    skip_nonfinite: OptionalBoolean = None
    optimizer_state: Annotated[OptimizerState, AlsoAccepts("torch.dtype")] = "float32"
    grad_dtype: OptionalDtype = None
    reduce_dtype: OptionalDtype = None
    split_bucket_bytes: Bytes = 64 * 2**20

    @field_validator("patch_torch_functions_type")
    @classmethod
    def _functions_run_in_16_bit(cls, value: torch.dtype | None) -> torch.dtype:
        if value is None or not is_lower_precision(value):
            raise ValueError(
                f"patch_torch_functions_type={value} is not a 16-bit type; use float16 or bfloat16, "
                "or patch_torch_functions=False to run everything in float32"
            )
        return value

    @model_validator(mode="after")
    def _sides_agree(self) -> Self:
        _check(self)
        return self

    @property
    def lower_precision_type(self) -> torch.dtype | None:
        """The 16-bit dtype of computations; None if everything is float32."""
        if self.patch_torch_functions:
            return self.patch_torch_functions_type
        if self.cast_model_type is not None and is_lower_precision(self.cast_model_type):
            return self.cast_model_type
        return None


def _check(props: Properties) -> None:
    cast, low, high = props.cast_model_type, props.min_loss_scale, props.max_loss_scale
    if props.patch_torch_functions and cast is not None and is_lower_precision(cast):
        raise ValueError(
            f"cast_model_type={cast} contradicts patch_torch_functions=True (O1): patched functions cast float32 "
            "weights as they use them, so the weights must stay float32. For 16-bit weights use opt_level='O2' or "
            "'O3' without patch_torch_functions; for 16-bit functions use opt_level='O1' without cast_model_type and "
            f"set patch_torch_functions_type={cast}"
        )
    if props.patch_torch_functions and props.master_weights:
        raise ValueError(
            f"master_weights={props.master_weights!r} contradicts patch_torch_functions=True (O1): there the weights "
            "are float32 already and need no masters. Drop master_weights, or use opt_level='O2' for 16-bit weights "
            "with float32 masters"
        )
    if props.master_weights == "split" and props.cast_model_type is not torch.bfloat16:
        raise ValueError(
            f'master_weights="split" contradicts cast_model_type={props.cast_model_type}: only a bfloat16 weight is '
            "the upper half of its float32 master, so only there does a 16-bit remainder complete it. Use "
            "cast_model_type=torch.bfloat16 (or opt_level='O5'), or master_weights=True for full float32 masters"
        )
    if props.master_weights == "model" and (cast is None or not is_lower_precision(cast)):
        raise ValueError(
            f'master_weights="model" contradicts cast_model_type={cast}: float32 parameters are cast inside forwards '
            "to a 16-bit type, and none is set. Use opt_level='O2' or 'O5', or set cast_model_type=torch.bfloat16"
        )
    if props.grad_dtype not in (None, torch.float32):
        raise ValueError(
            f"grad_dtype={props.grad_dtype} is not float32: by default gradients are float32 with full "
            "masters, and bfloat16 with split ones until a second backward pass is added to the first"
        )
    if props.grad_dtype is not None and cast is not None and is_lower_precision(cast) and not props.master_weights:
        raise ValueError(
            f"grad_dtype={props.grad_dtype} contradicts master_weights={props.master_weights}: without float32 masters "
            f"a step updates {dtype_name(cast)} weights by gradients of their own type. Use master_weights=True, or "
            '"split" in bfloat16'
        )
    if (
        props.optimizer_state != "float32"
        and cast is not None
        and is_lower_precision(cast)
        and not props.master_weights
    ):
        raise ValueError(
            f'optimizer_state="{props.optimizer_state}" contradicts master_weights={props.master_weights}: without '
            f"float32 masters an optimizer's state has the weights' dtype, {dtype_name(cast)}, and only float32 state "
            'is encoded. Use master_weights=True, or "split" in bfloat16, or omit optimizer_state'
        )
    if props.reduce_dtype not in (None, torch.float32):
        raise ValueError(
            f"reduce_dtype={props.reduce_dtype} is not float32: by default gradients are reduced in their "
            "own type. To send 32-bit gradients in 16, register torch's own fp16_compress_hook or bf16_compress_hook"
        )
    if low is not None and low > high:
        raise ValueError(
            f"min_loss_scale={low} is above max_loss_scale={high}: lower the one or raise the other so that "
            "dynamic scaling has room between them"
        )


def field_names() -> tuple[str, ...]:
    """Return the names of all properties, in declaration order."""
    return tuple(Properties.model_fields)


def build(values: dict[str, Any], sources: Mapping[str, str] | None = None) -> Properties:
    """Validate ``values`` into Properties.

    Args:
        values: property name -> value.
        sources: property name -> the file that its value was read from, for messages.

    Raises:
        ValueError: a value is not valid, or values contradict each other; all faults are in one text.
    """
    try:
        return Properties(**values)
    except ValidationError as error:
        raise ValueError("; ".join(_describe(item, sources or {}) for item in error.errors())) from None


def _describe(item: Any, sources: Mapping[str, str]) -> str:
    text = str(item["msg"])
    name = ".".join(str(part) for part in item["loc"][:1])
    if item["type"] != "value_error":
        # pydantic's texts name the allowed values only; add the value that was passed.
        text = f"{text[:1].lower()}{text[1:]}, but {item['input']!r} was passed"
    text = text.removeprefix("Value error, ")
    # A contradiction concerns two properties, which its text names.
    concerned = [source for own, source in sources.items() if own == name or (not name and f"{own}=" in text)]
    return ": ".join([*dict.fromkeys(concerned), *([name] if name else []), text])


_O1: Final[dict[str, Any]] = {"patch_torch_functions": True, "loss_scale": "dynamic"}
_O2: Final[dict[str, Any]] = {
    "cast_model_type": torch.float16,
    "keep_batchnorm_fp32": True,
    "master_weights": True,
    "loss_scale": "dynamic",
}

OPT_LEVELS: Final[Mapping[str, Properties]] = MappingProxyType(
    {
        "O0": Properties(cast_model_type=torch.float32, master_weights=False, loss_scale=1.0),
        "O1": Properties(**_O1),
        "O2": Properties(**_O2),
        "O3": Properties(
            cast_model_type=torch.float16, keep_batchnorm_fp32=False, master_weights=False, loss_scale=1.0
        ),
        "O4": Properties(**_O1 | {"patch_torch_functions_type": torch.bfloat16, "loss_scale": 1.0}),
        "O5": Properties(**_O2 | {"cast_model_type": torch.bfloat16, "loss_scale": 1.0}),
    }
)
