"""The cast lists, editable before ``initialize``: what was added, moved or taken out is registered there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import torch

from .... import amp as mp
from ....functions.cast_lists import APEX_POLICY, Cast

__all__ = ["functional_overrides", "register_edits", "tensor_overrides", "torch_overrides"]


def _names(prefix: str, cast: Cast) -> list[str]:
    """The functions of one kind under "torch", "torch.Tensor" or "torch.nn.functional", in the policy's order."""
    names = (name.rpartition(".") for row in APEX_POLICY if row.cast is cast for name in row.names)
    return list(dict.fromkeys(name for owner, _, name in names if owner == prefix))


def _lists(module: Any, prefix: str) -> SimpleNamespace:
    """What apex keeps in a file for each place that functions are reached from."""
    promoted = _names(prefix, Cast.PROMOTE)
    sequences = ("cat", "stack") if prefix == "torch" else ()
    return SimpleNamespace(
        MODULE=module,
        FP16_FUNCS=_names(prefix, Cast.LOWER_PRECISION),
        FP32_FUNCS=_names(prefix, Cast.FP32),
        CASTS=[name for name in promoted if name not in sequences],
        SEQUENCE_CASTS=[name for name in promoted if name in sequences],
    )


functional_overrides: Final = _lists(torch.nn.functional, "torch.nn.functional")
torch_overrides: Final = _lists(torch, "torch")
tensor_overrides: Final = _lists(torch.Tensor, "torch.Tensor")
# (name, message); emptied before initialize, the functions run in float16.
functional_overrides.BANNED_FUNCS = [
    (name, f"{name} is banned in float16: use its with_logits variant")
    for name in _names("torch.nn.functional", Cast.BANNED)
]

_REGISTER: Final = {
    "FP16_FUNCS": mp.register_half_function,
    "FP32_FUNCS": mp.register_float_function,
    "CASTS": mp.register_promote_function,
    "SEQUENCE_CASTS": mp.register_promote_function,
}


def _standing(lists: SimpleNamespace) -> dict[str, str]:
    """Function name -> the list that it stands on."""
    return {name: kind for kind in _REGISTER for name in getattr(lists, kind)}


_known: Final = [(lists, _standing(lists)) for lists in (functional_overrides, torch_overrides, tensor_overrides)]


def register_edits() -> None:
    """Register every function whose list has changed since the last call.

    A function taken off its list is registered to run in the widest type of its arguments, which for most is to be
    left alone. Names that torch does not have are passed over: lists are shared between versions.
    """
    for lists, known in _known:
        standing = _standing(lists)
        for name in sorted(known.keys() | standing.keys()):
            kind = standing.get(name, "CASTS")
            if known.get(name) != kind and callable(getattr(lists.MODULE, name, None)):
                _REGISTER[kind](lists.MODULE, name)
            known[name] = kind
