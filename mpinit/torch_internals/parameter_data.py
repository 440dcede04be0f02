"""Reads of ``parameter.data``: the one way to write to a parameter that torch does not count.

torch counts writes to a tensor in its version. A tensor that ``.data`` returns shares the memory and has a version of
its own, so a write through it leaves no trace on the parameter. While any weight with a full float32 master lives,
``torch.nn.Parameter`` has a ``data`` property that notes whose memory was given out; where weights are not compared by
their bits at every step (``masters/writes.py``), such weights are then compared with their masters. It is the only
patch of a class of torch's while a session without O1 lives, and can go when torch counts writes through ``.data``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

TENSOR_DATA: Final[Any] = torch.Tensor.data
TENSOR_DETACH: Final[Any] = torch.Tensor.detach

_noted_in: Final[dict[int, set[int]]] = {}


def note_data(parameter: torch.Tensor, accessed: set[int]) -> None:
    """From here on ``accessed`` gets the id of ``parameter`` when its ``data`` is read or set."""
    if not _noted_in:
        nn.Parameter.data = property(_get, _set)  # type: ignore[assignment]
    _noted_in[id(parameter)] = accessed


def forget_data(parameter: torch.Tensor) -> None:
    """The reverse of :func:`note_data`; with the last parameter the class is what it was."""
    _noted_in.pop(id(parameter), None)
    if not _noted_in and "data" in vars(nn.Parameter):
        del nn.Parameter.data


def forget_all_data(accessed: set[int]) -> None:
    """:func:`forget_data` for every parameter whose reads ``accessed`` gets."""
    for key in [key for key, noted_in in list(_noted_in.items()) if noted_in is accessed]:
        _noted_in.pop(key, None)
    if not _noted_in and "data" in vars(nn.Parameter):
        del nn.Parameter.data


def _get(parameter: torch.Tensor) -> torch.Tensor:
    accessed = _noted_in.get(id(parameter))
    if accessed is not None:
        accessed.add(id(parameter))
    values: torch.Tensor = TENSOR_DATA.__get__(parameter)
    return values


def _set(parameter: torch.Tensor, values: torch.Tensor) -> None:
    accessed = _noted_in.get(id(parameter))
    if accessed is not None:
        accessed.add(id(parameter))
    TENSOR_DATA.__set__(parameter, values)
