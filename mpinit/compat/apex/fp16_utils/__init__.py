"""The helpers of apex for loops with float32 masters that a script keeps by hand.

``FP16_Optimizer`` is refused, with the lines that replace it.
"""

from typing import NoReturn

from ...importing import refuse_missing
from .fp16util import (
    BN_convert_float,
    FP16Model,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


def __getattr__(name: str) -> NoReturn:
    refuse_missing(f"apex.fp16_utils.{name}", AttributeError)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
