"""The keywords of ``initialize`` for type checkers and editors, made by docs/generate.py."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import nn

Level = Literal["O0", "O1", "O2", "O3", "O4", "O5"]
Dtype = torch.dtype | Literal["float16", "fp16", "half", "bfloat16", "bf16", "float32", "fp32", "float"]
Config = str | Path | Mapping[str, Any] | None
_KeepFp32 = type[nn.Module] | str | Callable[[str, nn.Module], bool]
_KeepInputs = str | Callable[[str, Any], bool]


class Keywords(TypedDict, total=False):
    """The optional arguments of ``initialize``: its settings, and the fields of :class:`Properties`."""

    enabled: bool
    await_optimizers: bool
    num_losses: int
    config: Config
    verbosity: int
    process_group: Any
    cast_model_type: Dtype | Literal[False] | None
    patch_torch_functions: bool | None
    patch_torch_functions_type: Dtype | None
    keep_batchnorm_fp32: bool | None
    master_weights: bool | Literal["split", "model"] | None
    loss_scale: float | Literal["dynamic"] | None
    cast_model_outputs: Dtype | None
    keep_fp32: _KeepFp32 | Sequence[_KeepFp32] | None
    keep_inputs: _KeepInputs | Sequence[_KeepInputs] | None
    entry_points: str | Sequence[str] | None
    cast_policy: Literal["torch", "apex"] | None
    cast_scope: Literal["thread", "model"] | None
    allow_banned: bool | None
    init_loss_scale: float | None
    growth_factor: float | None
    backoff_factor: float | None
    growth_interval: int | None
    hysteresis: int | None
    min_loss_scale: float | None
    max_loss_scale: float | None
    max_consecutive_skips: int | None
    skip_nonfinite: bool | None
    optimizer_state: Literal["float32", "bfloat16", "int8"] | torch.dtype | None
    reduce_dtype: Dtype | None
    split_bucket_bytes: int | None
