"""The cast lists, editable before ``initialize``: what was added, moved or taken out is registered there."""

from __future__ import annotations

from typing import Any, Final

from ..... import amp as mp
from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "register_edits", "tensor_overrides", "torch_overrides"]

_MODULES: Final = (functional_overrides, torch_overrides, tensor_overrides)
_REGISTER: Final = {
    "FP16_FUNCS": mp.register_half_function,
    "FP32_FUNCS": mp.register_float_function,
    "CASTS": mp.register_promote_function,
    "SEQUENCE_CASTS": mp.register_promote_function,
}


def _standing(module: Any) -> dict[str, str]:
    """Function name -> the list that it stands on."""
    return {name: kind for kind in _REGISTER for name in getattr(module, kind, ())}


_shipped: Final = {module.__name__: _standing(module) for module in _MODULES}
_known: Final = {name: dict(standing) for name, standing in _shipped.items()}


def register_edits() -> None:
    """Register every function whose list has changed since the last call.

    A function taken off its list is registered to run in the widest type of its arguments, which for most is to be
    left alone. Names that torch does not have are passed over: lists are shared between versions.
    """
    for module in _MODULES:
        known, standing = _known[module.__name__], _standing(module)
        for name in sorted(known.keys() | standing.keys()):
            kind = standing.get(name, "CASTS")
            if known.get(name) != kind and callable(getattr(module.MODULE, name, None)):
                _REGISTER[kind](module.MODULE, name)
        known.clear()
        known.update({name: standing.get(name, "CASTS") for name in known.keys() | standing.keys()})
