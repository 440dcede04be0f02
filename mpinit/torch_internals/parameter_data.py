"""Writes through ``parameter.data``, which torch does not count.

torch counts in-place writes to a tensor in its version counter. The tensor that ``.data`` returns shares the memory and
has a counter of its own, so ``p.data.clamp_(-1, 1)`` does not change ``p._version``. Therefore ``torch.nn.Parameter``
has another property ``data`` while there are parameters to watch: it returns ``alias.detach()`` of one alias per
parameter, whose counter all of these share. A write moves that counter, and a mere read moves nothing.

A DTensor is no ``torch.nn.Parameter``, so its ``data`` is torch's. This file can be deleted when torch counts writes
through ``.data``.
"""

from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn

from ..basics.patching import undo_when_dropped
from ..basics.running import is_eager

TENSOR_DATA: Final[Any] = torch.Tensor.data
TENSOR_DETACH: Final[Any] = torch.Tensor.detach
_VERSION_OF: Final = attrgetter("_version")
_MEMORY_OF: Final = attrgetter("shape", "dtype", "device")


class _Data:
    """The alias of a parameter, and how often its data was written to through earlier aliases or replaced."""

    __slots__ = ("alias", "count")

    def __init__(self) -> None:
        self.alias: torch.Tensor | None = None
        self.count = 0


# The ids of the parameters that are watched: who watches them keeps them alive.
_watched: Final[set[int]] = set()
# Those of them whose data was used.
_used: Final[dict[int, _Data]] = {}
# Those of them whose data was replaced by a tensor of another dtype or shape; see has_other_data().
_changed: Final[set[int]] = set()


class Watched:
    """Parameters that are watched: :func:`versions_of` counts writes through their ``data``, until this is freed."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        # A parameter that is made later may have the id of a freed one.
        self._remove_property = undo_when_dropped(self, _remove_if_unused, at_once=partial(_forget, self._ids))

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch more parameters."""
        new = list(map(id, parameters))
        self._ids.update(new)
        _watched.update(new)
        if _watched and nn.Parameter.data is TENSOR_DATA:
            nn.Parameter.data = property(_get, _set)  # type: ignore[assignment]

    def discard(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch some parameters no longer."""
        ids = set(map(id, parameters))
        _forget(ids)
        self._ids -= ids

    def end(self) -> None:
        """Watch none of them any longer."""
        _forget(self._ids)
        self._remove_property()


def is_watched(parameter: torch.Tensor) -> bool:
    """Return whether any :class:`Watched` has a parameter."""
    return id(parameter) in _watched


def _forget(ids: Iterable[int]) -> None:
    for key in ids:
        _watched.discard(key)
        _used.pop(key, None)
        _changed.discard(key)


def _remove_if_unused() -> None:
    """Remove the property from the class if there is no parameter to watch."""
    if not _watched and nn.Parameter.data is not TENSOR_DATA:
        del nn.Parameter.data


def versions_of(tensors: Iterable[Any]) -> list[int]:
    """Return each tensor's version, which changes with every write that torch counts and every one through ``data``."""
    listed = list(tensors)
    try:
        found = list(map(_VERSION_OF, listed))
    except RuntimeError:  # an inference tensor has no version
        found = [0 if tensor.is_inference() else tensor._version for tensor in listed]
    for index, tensor in enumerate(listed) if _used else ():
        data = _used.get(id(tensor))
        if data is not None:
            found[index] += data.count + (0 if data.alias is None else data.alias._version)
    return found


def has_other_data() -> set[int]:
    """Return the ids of parameters whose data was replaced by a tensor of another dtype or shape; usually empty."""
    return _changed


def _get(parameter: torch.Tensor) -> torch.Tensor:
    data = _used.get(id(parameter))
    # torch.compile and torch.export read ``data`` under modes in which detach() would be an operation of the graph.
    if (data is None and not is_watched(parameter)) or not is_eager():
        values: torch.Tensor = TENSOR_DATA.__get__(parameter)
        return values
    if data is None:
        data = _used[id(parameter)] = _Data()
    if data.alias is None or not _is_same_memory(data.alias, parameter):
        _drop_alias(data)
        data.alias = TENSOR_DATA.__get__(parameter)
    view: torch.Tensor = TENSOR_DETACH(data.alias)
    return view


def _set(parameter: torch.Tensor, values: torch.Tensor) -> None:
    before = parameter.dtype, parameter.shape
    TENSOR_DATA.__set__(parameter, values)
    if is_watched(parameter):
        data = _used.setdefault(id(parameter), _Data())
        _drop_alias(data)
        data.count += 1
        if (parameter.dtype, parameter.shape) != before:
            _changed.add(id(parameter))


def _drop_alias(data: _Data) -> None:
    if data.alias is not None:
        data.count += data.alias._version
        data.alias = None


def _is_same_memory(alias: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a parameter has the memory that its alias was made of: ``set_`` and others may replace it."""
    return (
        alias.data_ptr() == parameter.data_ptr()
        and _MEMORY_OF(alias) == _MEMORY_OF(parameter)
        and alias.stride() == parameter.stride()
    )
