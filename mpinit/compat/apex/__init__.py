"""The package that scripts import as ``apex``, implemented with mpinit and torch.

It has amp, parallel, optimizers, normalization, multi_tensor_apply and fp16_utils. Importing anything else, such as
``apex.contrib``, raises an ImportError, as with an apex that was built without it.
"""

from importlib import import_module

from . import amp, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel

__all__ = ["amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel"]

__version__ = f"0.1+mpinit.{import_module('mpinit').__version__}"
