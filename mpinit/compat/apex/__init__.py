"""The package that scripts import as ``apex``, implemented with mpinit and torch.

It has amp, parallel, optimizers, normalization, multi_tensor_apply and fp16_utils. Importing anything else, such as
``apex.contrib``, raises an ImportError, as with an apex that was built without it.
"""

from importlib import import_module
from typing import NoReturn

from ..importing import ABSENT_MODULES, MISSING
from . import amp, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel

__all__ = ["amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel"]

__version__ = f"0.1+mpinit.{import_module('mpinit').__version__}"


def __getattr__(name: str) -> NoReturn:
    # An ImportError, not an AttributeError: scripts that run without it write ``import apex; apex.contrib...`` in a try
    # block with ``except ImportError``.
    if f"apex.{name}" in ABSENT_MODULES:
        installed = f"install NVIDIA apex for apex.{name}: mpinit then provides apex.amp alone"
        raise ImportError(
            f"apex.{name} is not part of the apex that mpinit provides; it provides {', '.join(__all__)}. "
            f"In its place, {MISSING.get(f'apex.{name}', installed)}",
            name=f"{__name__}.{name}",
        )
    raise AttributeError(f"module 'apex' has no attribute {name!r}")
