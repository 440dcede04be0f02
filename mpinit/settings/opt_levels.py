"""The optimisation levels: one row each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from .properties import Properties

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
