"""Optimizers of torch, LAMB, NovoGrad and apex's Adagrad, under apex's names."""

from typing import NoReturn

from ...importing import refuse_missing
from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_novograd import FusedNovoGrad
from .fused_sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]


def __getattr__(name: str) -> NoReturn:
    refuse_missing(f"apex.optimizers.{name}", AttributeError)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
