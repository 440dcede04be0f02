"""Attributes of modules that are functions of torch, as in ``self.norm = F.normalize``.

Such an attribute would call the function without casts. It could not be pickled either: pickle stores a function by its
name, and the name refers to the wrapper. So while wrappers are installed, the attributes are set to the wrappers, and
afterwards to torch's functions again.
"""

import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from torch import nn

from ..basics.modules import modules_of
from ..basics.patching import Undo
from .installation import INSTALLATION, ORIGINALS

_FUNCTIONS: Final = {types.FunctionType, types.BuiltinFunctionType}


def wrap(models: Sequence[nn.Module]) -> Undo:
    """Replace torch's functions among the attributes of modules by their wrappers.

    Args:
        models: the session's models. The undo refers to the sequence, which may refer to them weakly.

    Returns:
        The undo. It replaces all wrappers by torch's functions, also those that modules have stored since.
    """
    _replace(models, INSTALLATION.wrapper_of)
    return partial(_replace, models, ORIGINALS.get)


def _replace(models: Sequence[nn.Module], other: Callable[[Any], Any]) -> None:
    for attributes in map(vars, modules_of(*models)):
        if not _FUNCTIONS.isdisjoint(map(type, attributes.values())):
            for name, value in attributes.items():
                if type(value) in _FUNCTIONS and (function := other(value)) is not None:
                    attributes[name] = function
