"""The table of properties: what a level, a configuration or a keyword sets, checked as a whole, and the levels."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, MethodType
from typing import Annotated, Any, Final, Literal, Self

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainValidator,
    ValidationError,
    model_validator,
)

from ..basics.dtypes import dtype_name, is_lower_precision, parse_dtype
from .loss_scale import DynamicLossScale, LossScale, check_scale

# Types for the signature of initialize, too.
KeptModules = type[torch.nn.Module] | str | Callable[[str, torch.nn.Module], bool]
KeptInputs = str | Callable[[str, Any], bool]


def is_nothing(value: Any) -> bool:
    """Return whether ``value`` is None, or the string that a command line or a TOML file has for it."""
    return value is None or (isinstance(value, str) and value.strip().lower() == "none")


def _dtype(value: Any) -> torch.dtype | None:
    nothing = is_nothing(value) or value is False or (isinstance(value, str) and value.lower() == "false")
    return None if nothing else parse_dtype(value)


def _loss_scale(value: Any) -> Any:
    if isinstance(value, Mapping):  # the table [loss_scale] of a configuration file
        try:
            return DynamicLossScale(**value)
        except TypeError as error:
            raise ValueError(str(error)) from None
    if isinstance(value, DynamicLossScale) or (isinstance(value, str) and value == "dynamic"):
        return value
    try:
        return check_scale(value if isinstance(value, bool) else float(value))
    except (TypeError, ValueError):
        raise ValueError(
            f'{value!r} is not a loss scale; use "dynamic", a number between 2**-126 and 2**126 such as 128.0, or an '
            "object mpinit.DynamicLossScale(...)"
        ) from None


def _entries(value: Any) -> tuple[Any, ...]:
    """Return the entries of a list, of one entry without a list, or of nothing."""
    if is_nothing(value):
        return ()
    if isinstance(value, (set, frozenset)):
        # Ranks compare the entries, and a set has another order in each process.
        return tuple(sorted(value, key=lambda entry: getattr(entry, "__qualname__", str(entry))))
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _kept_modules(value: Any) -> tuple[KeptModules, ...]:
    for entry in (entries := _entries(value)):
        # Any class and any module can be called, so that it would be taken for a predicate.
        is_right = issubclass(entry, torch.nn.Module) if isinstance(entry, type) else callable(entry)
        if isinstance(entry, torch.nn.Module) or not (is_right or isinstance(entry, str)):
            shown = type(entry).__name__ if isinstance(entry, torch.nn.Module) else repr(entry)
            raise ValueError(
                f"{shown} is neither a type of modules, nor a dotted name such as 'head' or '*.norm', nor a predicate "
                "(name, module) -> bool; use one of these, or a list of them"
            )
    return entries


def _kept_inputs(value: Any) -> tuple[KeptInputs, ...]:
    for entry in (entries := _entries(value)):
        if not (isinstance(entry, str) or (callable(entry) and not isinstance(entry, (type, torch.nn.Module)))):
            raise ValueError(
                f"{entry!r} is neither the name of an argument of forward, such as 'targets', nor a predicate "
                "(name, value) -> bool; use one of these, or a list of them"
            )
    return entries


def _entry_points(value: Any) -> tuple[str, ...]:
    for entry in (entries := _entries(value)):
        if isinstance(entry, MethodType):
            raise ValueError(f"a method was passed; pass its name, {entry.__name__!r}, a string")
        if not isinstance(entry, str) or not all(part.isidentifier() or part.isdigit() for part in entry.split(".")):
            raise ValueError(
                f"{entry!r} is not the name of a method; use names such as 'forward_features', or "
                "'backbone.forward_features' for a module inside, or a list of them"
            )
    return entries


_Dtype = Annotated[torch.dtype | None, PlainValidator(_dtype)]
_Scale = Annotated[float, AfterValidator(partial(check_scale, name="value"))]
_Modules = Annotated[tuple[Any, ...], BeforeValidator(_kept_modules)]
_Nothing = BeforeValidator(lambda value: None if is_nothing(value) else value)


class Properties(BaseModel):
    """The properties after validation: what :func:`initialize` says of the keywords of the same names.

    They are frozen. Strings are parsed, as a command line and a configuration file have them.

    Example:
        >>> Properties(loss_scale="128.0").loss_scale
        128.0
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    # The five that a level sets.
    cast_model_type: _Dtype = None
    patch_torch_functions: bool | Literal["model"] = False
    keep_batchnorm_fp32: Annotated[bool | None, _Nothing] = None
    master_weights: Annotated[bool | Literal["split", "model"] | None, _Nothing] = None
    loss_scale: Annotated[float | Literal["dynamic"] | InstanceOf[DynamicLossScale], BeforeValidator(_loss_scale)] = 1.0
    # apex's others.
    cast_model_outputs: _Dtype = None
    num_losses: Annotated[int, Field(ge=1, le=2**16)] = 1  # a scaler each: a million takes minutes, and is a mistake
    verbosity: int = 1
    min_loss_scale: Annotated[_Scale | None, _Nothing] = None
    max_loss_scale: Annotated[_Scale | None, _Nothing] = None
    # ROCm apex's.
    patch_torch_functions_type: _Dtype = torch.float16
    # mpinit's.
    keep_fp32: _Modules = ()
    compute_fp32: _Modules = ()
    keep_inputs: Annotated[tuple[Any, ...], BeforeValidator(_kept_inputs)] = ()
    entry_points: Annotated[tuple[str, ...], BeforeValidator(_entry_points)] = ()
    skip_nonfinite: bool = False
    optimizer_state: Literal["float32", "bfloat16", "int8"] = "float32"
    grad_dtype: _Dtype = None

    @model_validator(mode="after")
    def _sides_agree(self) -> Self:
        contradiction = _contradiction(self)
        if contradiction is not None:
            raise ValueError(contradiction)
        return self

    @property
    def lower_precision_type(self) -> torch.dtype | None:
        """The 16-bit dtype of computations; None if everything is float32."""
        if self.patch_torch_functions:
            return self.patch_torch_functions_type
        return self.cast_model_type if self.casts_to_16_bit else None

    @property
    def casts_to_16_bit(self) -> bool:
        """Return whether the model itself is cast to a 16-bit dtype."""
        return self.cast_model_type is not None and is_lower_precision(self.cast_model_type)

    def scaling(self) -> LossScale:
        """Return the number that losses are multiplied by, or the rule by which it moves.

        Raises:
            ValueError: its limits contradict each other.
        """
        if not isinstance(self.loss_scale, DynamicLossScale) and self.loss_scale != "dynamic":
            return self.loss_scale
        rule = DynamicLossScale() if self.loss_scale == "dynamic" else self.loss_scale
        low = rule.min if self.min_loss_scale is None else self.min_loss_scale
        high = rule.max if self.max_loss_scale is None else self.max_loss_scale
        if low is not None and low > high:
            raise ValueError(
                f"min_loss_scale={low} is above max_loss_scale={high}: lower the one or raise the other so that "
                "dynamic scaling has room between them"
            )
        # A first scale outside of the limits is moved to the nearer one.
        first = min(rule.init if low is None else max(rule.init, low), high)
        return dataclasses.replace(rule, init=first, min=low, max=high)


def _contradiction(props: Properties) -> str | None:
    """Return what contradicts what, and what to do; None where all sides agree."""
    cast, masters, functions = props.cast_model_type, props.master_weights, props.patch_torch_functions
    o1 = f"patch_torch_functions={functions!r} (O1)"
    props.scaling()
    if props.patch_torch_functions_type is None or not is_lower_precision(props.patch_torch_functions_type):
        return (
            f"patch_torch_functions_type={props.patch_torch_functions_type} is not a 16-bit type; use float16 or "
            "bfloat16, or patch_torch_functions=False to run everything in float32"
        )
    if functions and props.casts_to_16_bit:
        return (
            f"cast_model_type={cast} contradicts {o1}, whose functions cast float32 weights as they use them. For "
            "16-bit weights use opt_level='O2' or 'O3'; for 16-bit functions opt_level='O1' without cast_model_type, "
            f"and patch_torch_functions_type={cast}"
        )
    if functions and masters:
        return (
            f"master_weights={masters!r} contradicts {o1}, where weights are float32 and need no masters. Drop "
            "master_weights, or use opt_level='O2' for 16-bit weights with float32 masters"
        )
    if functions and props.keep_batchnorm_fp32 is False:
        return (
            f"keep_batchnorm_fp32=False contradicts {o1}, where all weights are float32, those of BatchNorm too. Drop "
            "keep_batchnorm_fp32, or use opt_level='O3' for a model that is 16-bit throughout"
        )
    if masters == "split" and cast is not torch.bfloat16:
        return (
            f'master_weights="split" contradicts cast_model_type={cast}: only a bfloat16 weight is the upper half of '
            "its float32 master. Use cast_model_type=torch.bfloat16 (or opt_level='O5'), or master_weights=True"
        )
    if masters == "model" and not props.casts_to_16_bit:
        return (
            f'master_weights="model" contradicts cast_model_type={cast}: forwards cast the parameters to a 16-bit '
            "type, and none is set. Use opt_level='O2' or 'O5', or cast_model_type=torch.bfloat16"
        )
    if props.grad_dtype not in (None, torch.float32):
        return f"grad_dtype={props.grad_dtype} is neither torch.float32 nor None (gradients as autograd makes them)"
    if cast is not None and props.casts_to_16_bit and not masters:
        # Without masters an optimizer steps 16-bit weights, with state and gradients of their dtype.
        way_out = 'Use master_weights=True, or "split" in bfloat16'
        if props.grad_dtype is not None:
            return (
                f"grad_dtype={props.grad_dtype} contradicts master_weights={masters}, where a step uses gradients of "
                f"the weights' dtype, {dtype_name(cast)}. {way_out}"
            )
        if props.optimizer_state != "float32":
            return (
                f'optimizer_state="{props.optimizer_state}" contradicts master_weights={masters}, where state has the '
                f"weights' dtype, {dtype_name(cast)}, and only float32 state is encoded. {way_out}"
            )
    return None


def build(values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> Properties:
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
        faults: dict[str, list[Any]] = {}
        for item in error.errors():  # a value of several types has a fault for each
            faults.setdefault(str(item["loc"][0]) if item["loc"] else "", []).append(item)
        texts = [_describe(name, items, sources or {}) for name, items in faults.items()]
        raise ValueError("; ".join(texts)) from None


def _describe(name: str, items: Sequence[Any], sources: Mapping[str, str]) -> str:
    if items[0]["type"] == "value_error":
        text = str(items[0]["msg"]).removeprefix("Value error, ")
    else:
        # pydantic's texts name the allowed values only; add the value that was passed.
        allowed = [item["msg"][:1].lower() + item["msg"][1:] for item in items]
        text = f"{', or '.join(allowed)}, but {items[0]['input']!r} was passed"
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
