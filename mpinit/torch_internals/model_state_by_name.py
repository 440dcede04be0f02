"""``set_model_state_dict(full_state_dict=True)`` and weights with masters: what comes in float32 arrives in float32.

The fault: torch collects what ``load_state_dict`` is to be given in a dict that starts with the model's own tensors.
What rank 0 broadcasts is copied into the shards there, which are 16-bit, before anybody has seen it in float32; and
what the full state lacks (``strict=False``) is loaded from the weights themselves. Here the dict starts with float32
numbers, those of the masters.

``_load_model_state_dict`` of torch/distributed/checkpoint/state_dict.py, and what it calls of
torch/distributed/_state_dict_utils.py, alike in torch 2.11 to 2.13. Without masters it is no fault: a weight is all
there is of it. It can go when torch no longer loads into shards in place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch

from ..basics.patching import Undo
from .optimizer_state_by_name import MODULE
from .patches_on_import import PatchesOnImport

Values = Callable[[torch.Tensor], torch.Tensor | None]

_owners: Final[dict[int, weakref.WeakMethod[Values]]] = {}


def load_in_float32(values_of: Values) -> Undo:
    """Let torch load a full state in float32.

    Args:
        values_of: tensor -> the float32 numbers that stand for it, or None; a method, whose object is held weakly.
    """
    known = weakref.WeakMethod(values_of)
    weakref.finalize(values_of.__self__, _forget, id(known)).atexit = False  # type: ignore[attr-defined]
    _owners[id(known)] = known
    _PATCHES.need(id(known))
    return functools.partial(_forget, id(known))


def _forget(number: int) -> None:
    _owners.pop(number, None)
    _PATCHES.need_no_more(number)


def _from_float32(inner: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def wrapper(full_state_dict: Any, local_state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        for name, tensor in local_state_dict.items():
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                local_state_dict[name] = _values_of(tensor)
        return inner(full_state_dict, local_state_dict, *args, **kwargs)

    return wrapper


def _values_of(tensor: torch.Tensor) -> torch.Tensor:
    for known in list(_owners.values()):
        values_of = known()
        values = None if values_of is None else values_of(tensor)
        if values is not None:
            # Shards are written to in place.
            return values.clone() if hasattr(values, "device_mesh") else values
    return tensor


_PATCHES: Final = PatchesOnImport(
    MODULE, {"_broadcast_state_dict": _from_float32, "_distribute_state_dict": _from_float32}
)
