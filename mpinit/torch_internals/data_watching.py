"""Noticing that a parameter's ``.data`` was handed out: writes through it leave no other trace.

torch counts in-place writes in a tensor's version, but not those through ``.data``. While anything is watched,
``torch.nn.Parameter`` has a ``data`` property of its own that takes down who asked; the parameters themselves stay
what they are, and everything but ``.data`` costs what it did.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import torch
from torch import nn

TENSOR_DATA: Final[Any] = torch.Tensor.data

_watchers: dict[int, weakref.ref[Watcher]] = {}
_lock = threading.RLock()  # the garbage collector may drop a watcher while one is being set up


class Watcher:
    """A set of parameters, and which of them had their ``.data`` handed out or replaced.

    Args:
        keeps_images: whether to keep a copy of what was handed out, for :meth:`image_of`.

    Example:
        >>> watcher, weight = Watcher(), nn.Parameter(torch.ones(2))
        >>> watcher.watch(weight)
        >>> _ = weight.data.mul_(2)
        >>> weight in watcher.handed_out
        True
        >>> watcher.close()
    """

    def __init__(self, keeps_images: bool = False) -> None:
        self.handed_out: dict[torch.Tensor, tuple[int, torch.Tensor] | None] = {}
        self._keeps_images = keeps_images
        self._held: dict[torch.Tensor, list[weakref.ref[torch.Tensor]]] = {}
        self._ids: set[int] = set()
        # A watcher that is dropped without being closed leaves nothing behind.
        weakref.finalize(self, _forget, self._ids)

    def watch(self, parameter: nn.Parameter) -> None:
        """Watch one parameter."""
        with _lock:
            _watchers[id(parameter)] = weakref.ref(self)
            self._ids.add(id(parameter))
            if "data" not in vars(nn.Parameter):
                nn.Parameter.data = property(_get, _set, doc=torch.Tensor.data.__doc__)  # type: ignore[assignment]

    def unwatch(self, parameter: nn.Parameter) -> None:
        """Stop watching one parameter."""
        self._ids.discard(id(parameter))
        self.handed_out.pop(parameter, None)
        self._held.pop(parameter, None)
        _forget({id(parameter)})

    def hand_out(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter's data; as long as somebody holds it, writes through it are expected."""
        self.take_down(parameter)
        data: torch.Tensor = TENSOR_DATA.__get__(parameter)
        self._held.setdefault(parameter, []).append(weakref.ref(data))
        return data

    def forget(self, parameter: torch.Tensor) -> None:
        """What was written has been seen to; whoever still holds what was handed out is watched from here on."""
        self.handed_out.pop(parameter, None)
        held = [data for data in self._held.pop(parameter, ()) if data() is not None]
        if held:
            self._held[parameter] = held
            self.take_down(parameter)

    def forget_all(self) -> None:
        """:meth:`forget` for every parameter."""
        for parameter in list(self.handed_out):
            self.forget(parameter)

    def take_down(self, parameter: torch.Tensor) -> None:
        """Note that ``.data`` is being handed out; what it is at the first time is what counts."""
        if parameter not in self.handed_out:
            value = parameter.detach()
            self.handed_out[parameter] = (parameter._version, value.clone()) if self._keeps_images else None

    def image_of(self, parameter: torch.Tensor, version: int) -> torch.Tensor | None:
        """What a parameter held before its ``.data`` was handed out, if its version was ``version`` then."""
        image = self.handed_out.get(parameter)
        return image[1] if image is not None and image[0] == version else None

    def close(self) -> None:
        """Stop watching everything."""
        self.handed_out.clear()
        self._held.clear()
        _forget(self._ids)
        self._ids.clear()


def _forget(ids: set[int]) -> None:
    with _lock:
        for number in ids:
            _watchers.pop(number, None)
        if not _watchers and "data" in vars(nn.Parameter):
            del nn.Parameter.data


def _watcher_of(parameter: torch.Tensor) -> Watcher | None:
    reference = _watchers.get(id(parameter))
    return None if reference is None else reference()


def _get(parameter: torch.Tensor) -> Any:
    watcher = _watcher_of(parameter)
    return TENSOR_DATA.__get__(parameter) if watcher is None else watcher.hand_out(parameter)


def _set(parameter: torch.Tensor, value: torch.Tensor) -> None:
    watcher = _watcher_of(parameter)
    if watcher is not None:
        watcher.take_down(parameter)
    TENSOR_DATA.__set__(parameter, value)
