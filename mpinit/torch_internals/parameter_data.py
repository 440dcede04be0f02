"""Reads of ``parameter.data``: the one way to write to a parameter that torch does not count.

torch counts writes to a tensor in its version. A tensor that ``.data`` returns shares the memory and has a version of
its own, so a write through it leaves no trace on the parameter. While any weight with a full float32 master lives,
``torch.nn.Parameter`` has a ``data`` property that notes whose memory was given out; where not all weights are compared
with their masters at every step (``masters/full.py``), such weights are. So it has while a forward runs with casts in
the places of its parameters (``model/forward_weights.py``). It is the only patch of a class of torch's while a session
without O1 lives, and can go when torch counts writes through ``.data``.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

TENSOR_DATA: Final[Any] = torch.Tensor.data
TENSOR_DETACH: Final[Any] = torch.Tensor.detach

_noted_in: Final[dict[int, set[int]]] = {}
# Many tensors whose ids one set gets, for a short time: by the set's id.
_columns: Final[dict[int, tuple[Sequence[torch.Tensor], set[int]]]] = {}


def note_data(parameter: torch.Tensor, accessed: set[int]) -> None:
    """From here on ``accessed`` gets the id of ``parameter`` when its ``data`` is read or set."""
    _patch()
    _noted_in[id(parameter)] = accessed


def forget_data(parameter: torch.Tensor) -> None:
    """The reverse of :func:`note_data`; with the last parameter the class is what it was."""
    _noted_in.pop(id(parameter), None)
    _unpatch()


def forget_all_data(accessed: set[int]) -> None:
    """:func:`forget_data` for every parameter whose reads ``accessed`` gets."""
    for key in [key for key, noted_in in list(_noted_in.items()) if noted_in is accessed]:
        _noted_in.pop(key, None)
    _unpatch()


def note_data_of(parameters: Sequence[torch.Tensor]) -> set[int]:
    """A set that gets the id of each of them whose ``data`` is read or set, until :func:`forget_data_of`."""
    accessed: set[int] = set()
    if parameters:
        _patch()
        _columns[id(accessed)] = parameters, accessed
    return accessed


def forget_data_of(accessed: set[int]) -> None:
    """The reverse of :func:`note_data_of`."""
    if _columns.pop(id(accessed), None) is not None:
        _unpatch()


def _patch() -> None:
    if "data" not in vars(nn.Parameter):
        nn.Parameter.data = property(_get, _set)  # type: ignore[assignment]


def _unpatch() -> None:
    if not (_noted_in or _columns) and "data" in vars(nn.Parameter):
        del nn.Parameter.data


def _note(parameter: torch.Tensor) -> None:
    key = id(parameter)
    if key in _noted_in:
        _noted_in[key].add(key)
    for parameters, accessed in list(_columns.values()):
        if any(each is parameter for each in parameters):
            accessed.add(key)


def _get(parameter: torch.Tensor) -> torch.Tensor:
    _note(parameter)
    values: torch.Tensor = TENSOR_DATA.__get__(parameter)
    return values


def _set(parameter: torch.Tensor, values: torch.Tensor) -> None:
    _note(parameter)
    TENSOR_DATA.__set__(parameter, values)
