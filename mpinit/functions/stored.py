"""Torch's functions that modules keep as attributes, as in ``self.norm = F.normalize``.

A function is pickled by its name: one that is not what its name refers to cannot be. While wrappers are installed,
modules hold the wrappers, which cast as the names do; afterwards they hold torch's functions again.
"""

import types
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from torch import nn

from ..basics.modules import modules_of
from ..basics.patching import Undo
from .installation import INSTALLATION, ORIGINALS

_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType)


def wrap(models: Sequence[nn.Module]) -> Undo:
    """Replace torch's functions among the attributes of modules by their wrappers.

    Args:
        models: the session's, which the undo keeps alive only if the sequence does.

    Returns:
        The undo, which replaces wrappers by torch's functions, also those that modules have stored since.
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
    """Yield the functions among the attributes of the models' modules: the attributes, the name, the function."""
    for model in models:
        for module in modules_of(model):
            attributes = vars(module)
            for name, value in attributes.items():
                if type(value) in _FUNCTIONS:
                    yield attributes, name, value
