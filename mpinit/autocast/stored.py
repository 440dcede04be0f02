"""Attributes of modules that are functions of torch, as in ``self.norm = F.normalize``.

Such an attribute would call the function without casts. It could not be pickled either: pickle stores a function by its
name, and the name refers to the wrapper. So while wrappers are installed, the attributes are set to the wrappers, and
afterwards to torch's functions again.
"""

import types
from collections.abc import Iterator, Sequence
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
    for attributes, name, function in list(_stored(models)):
        wrapper = INSTALLATION.wrapper_of(function)
        if wrapper is not None:
            attributes[name] = wrapper
    return partial(_unwrap, models)


def _unwrap(models: Sequence[nn.Module]) -> None:
    for attributes, name, function in list(_stored(models)):
        if isinstance(function, types.FunctionType) and function in ORIGINALS:
            attributes[name] = ORIGINALS[function]


def _stored(models: Sequence[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield (attributes, name, function) for each attribute of the models' modules that is a function."""
    for model in models:
        for module in modules_of(model):
            attributes = vars(module)
            if not _FUNCTIONS.isdisjoint(map(type, attributes.values())):
                for name, value in attributes.items():
                    if type(value) in _FUNCTIONS:
                        yield attributes, name, value
