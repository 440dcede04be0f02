"""The types of the properties: what pydantic checks them by. Importing it takes a while, so that few files do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from ..basics.dtypes import dtype_name
from .spellings import (
    parse_bool,
    parse_bytes,
    parse_count,
    parse_entry_points,
    parse_keep_fp32,
    parse_keep_inputs,
    parse_loss_scale,
    parse_master_weights,
    parse_optimizer_state,
    parse_optional_bool,
    parse_optional_dtype,
    parse_optional_scale,
    parse_scale,
)

_DTYPE_SCHEMA = WithJsonSchema(
    {"anyOf": [{"enum": ["float16", "bfloat16", "float32"], "type": "string"}, {"type": "null"}]}
)
OptionalDtype = Annotated[
    torch.dtype | None,
    BeforeValidator(parse_optional_dtype),
    PlainSerializer(lambda value: None if value is None else dtype_name(value), when_used="json"),
    _DTYPE_SCHEMA,
]
Boolean = Annotated[bool, BeforeValidator(parse_bool)]
OptionalBoolean = Annotated[bool | None, BeforeValidator(parse_optional_bool)]
MasterWeights = Annotated[bool | Literal["split", "model"] | None, BeforeValidator(parse_master_weights)]
OptimizerState = Annotated[Literal["float32", "bfloat16", "int8"], BeforeValidator(parse_optimizer_state)]
LossScale = Annotated[float | Literal["dynamic"], BeforeValidator(parse_loss_scale)]
Scale = Annotated[float, BeforeValidator(parse_scale)]
OptionalScale = Annotated[float | None, BeforeValidator(parse_optional_scale)]
Count = Annotated[int, BeforeValidator(parse_count)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
KeepFloat32 = type[torch.nn.Module] | str | Callable[[str, torch.nn.Module], bool]
KeepFloat32List = Annotated[tuple[KeepFloat32, ...], BeforeValidator(parse_keep_fp32)]
KeepInput = str | Callable[[str, Any], bool]
KeepInputs = Annotated[tuple[KeepInput, ...], BeforeValidator(parse_keep_inputs)]
EntryPoints = Annotated[tuple[str, ...], BeforeValidator(parse_entry_points)]
