"""The keywords of ``initialize`` for type checkers and editors, made by docs/generate.py."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import nn

# A command line passes strings: the literals are for editors.
Level = Literal["O0", "O1", "O2", "O3", "O4", "O5"] | str
Dtype = torch.dtype | Literal["float16", "fp16", "half", "bfloat16", "bf16", "float32", "fp32", "float"]
Config = str | Path | Mapping[str, Any] | None
KeepFp32 = type[nn.Module] | str | Callable[[str, nn.Module], bool]
KeepInputs = str | Callable[[str, Any], bool]


class Keywords(TypedDict, total=False):
    """The optional arguments of ``initialize``: its settings, and the fields of :class:`Properties`."""

    enabled: bool | str | None
    await_optimizers: bool | str | None
    num_losses: int | str | None
    config: Config
    verbosity: int | str | None
    process_group: Any
    cast_model_type: Dtype | Literal[False] | None
    patch_torch_functions: bool | str | None
    patch_torch_functions_type: Dtype | None
    keep_batchnorm_fp32: bool | str | None
    master_weights: bool | Literal["split", "model", "True", "False"] | None
    loss_scale: float | Literal["dynamic"] | str | None
    cast_model_outputs: Dtype | None
    keep_fp32: KeepFp32 | Sequence[KeepFp32] | None
    keep_inputs: KeepInputs | Sequence[KeepInputs] | None
    entry_points: str | Sequence[str] | None
    cast_policy: Literal["torch", "apex"] | None
    cast_scope: Literal["thread", "model"] | None
    allow_banned: bool | str | None
    init_loss_scale: float | str | None
    growth_factor: float | str | None
    backoff_factor: float | str | None
    growth_interval: int | str | None
    hysteresis: int | str | None
    min_loss_scale: float | str | None
    max_loss_scale: float | str | None
    max_consecutive_skips: int | str | None
    skip_nonfinite: bool | str | None
    optimizer_state: Literal["float32", "bfloat16", "int8"] | torch.dtype | None
    grad_dtype: Dtype | None
    reduce_dtype: Dtype | None
    split_bucket_bytes: int | str | None
