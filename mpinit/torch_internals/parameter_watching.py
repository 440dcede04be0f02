"""Noticing what leaves no trace in torch: writes through a parameter's ``.data``, or a numpy view of ``.detach()``.

torch counts in-place writes in a tensor's version, but not those through ``.data`` or numpy. While anything is
watched, ``torch.nn.Parameter`` has a ``data`` property and a ``detach`` of its own that record who asked, with
checksums of what the parameter held then; and a ``grad`` whose setter brings gradients of other floating types into
the type that the parameter takes. The parameters themselves stay what they are; reading ``.grad`` costs what it did.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ..basics.checksum import checksums, words_of

TENSOR_DATA: Final[Any] = torch.Tensor.data
TENSOR_GRAD: Final[Any] = torch.Tensor.grad
TENSOR_DETACH: Final[Any] = torch.Tensor.detach

_watchers: dict[int, weakref.ref[Watcher]] = {}
_lock = threading.RLock()  # the garbage collector may drop a watcher while one is being set up


class Shown(NamedTuple):
    """A gradient of another type than a parameter takes, and the copy of it that the parameter shows."""

    source: torch.Tensor
    source_version: int
    copy: torch.Tensor
    copy_version: int

    @classmethod
    def of(cls, source: torch.Tensor, dtype: torch.dtype) -> Shown:
        """Make the copy."""
        copy = TENSOR_DETACH(source).to(dtype)
        return cls(source, source._version, copy, copy._version)

    def is_as_shown(self, gradient: torch.Tensor | None) -> bool:
        """Whether a parameter's gradient is the copy still, and nobody has written to it."""
        return gradient is self.copy and self.copy._version == self.copy_version

    def known(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Which of the two is what it was; None where neither is.

        Args:
            gradient: the parameter's at present.
        """
        if self.is_as_shown(gradient):
            return self.copy
        return self.source if self.source._version == self.source_version else None


class Watcher:
    """A set of parameters, and which of them somebody got hold of in a way that leaves no trace of writes.

    Example:
        >>> watcher, weight = Watcher(), nn.Parameter(torch.ones(2))
        >>> watcher.watch(weight)
        >>> _ = weight.data.mul_(2)
        >>> watcher.was_written(weight)
        True
        >>> watcher.close()
    """

    def __init__(self) -> None:
        self.handed_out: dict[torch.Tensor, torch.Tensor | None] = {}
        # Parameters whose gradient somebody assigned, by id, and what their twin's was then, with its version; autograd
        # assigns without being noticed.
        self.assigned: dict[int, tuple[torch.Tensor | None, int]] = {}
        # Parameters whose gradient was cleared together with their twin's, by id.
        self.cleared: set[int] = set()
        # What a backward pass has left on both of two parameters, by the id of the one that autograd does not know.
        self.arrived: dict[int, torch.Tensor | Shown] = {}
        self.is_paused = False
        self._twins: dict[int, nn.Parameter] = {}
        self._held: dict[torch.Tensor, list[weakref.ref[torch.Tensor]]] = {}
        self._ids: set[int] = set()
        # A watcher that is dropped without being closed leaves nothing behind.
        weakref.finalize(self, _forget, self._ids)

    def watch(self, parameter: nn.Parameter, twin: nn.Parameter | None = None) -> None:
        """Watch one parameter.

        Args:
            parameter: the parameter.
            twin: another whose gradient is cleared where somebody clears the parameter's, which is the same tensor.
        """
        with _lock:
            if twin is not None:
                self._twins[id(parameter)] = twin
            _watchers[id(parameter)] = weakref.ref(self)
            self._ids.add(id(parameter))
            if "data" not in vars(nn.Parameter):
                for name, member in _MEMBERS.items():
                    setattr(nn.Parameter, name, member)

    def unwatch(self, parameter: nn.Parameter) -> None:
        """Stop watching one parameter."""
        self._ids.discard(id(parameter))
        self._twins.pop(id(parameter), None)
        self.handed_out.pop(parameter, None)
        self._held.pop(parameter, None)
        _forget({id(parameter)})

    def __enter__(self) -> Watcher:
        """Inside the block whoever asks is not recorded: an optimizer may use ``.data`` in its step."""
        self.is_paused = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_paused = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block whoever asks is recorded again: a closure of the user's runs in an optimizer's step."""
        paused, self.is_paused = self.is_paused, False
        try:
            yield
        finally:
            self.is_paused = paused

    def hand_out(self, parameter: torch.Tensor, view: Callable[[Any], Any]) -> torch.Tensor:
        """A view of the parameter's memory; as long as somebody holds it, writes through it are expected."""
        if not self.is_paused:
            self.take_down(parameter)
        seen: torch.Tensor = view(parameter)
        if not self.is_paused:
            self._held.setdefault(parameter, []).append(weakref.ref(seen))
        return seen

    def forget(self, parameter: torch.Tensor) -> None:
        """What was written has been seen to; whoever still holds what was handed out is watched from here on."""
        self.handed_out.pop(parameter, None)
        held = [view for view in self._held.pop(parameter, ()) if view() is not None]
        if held:
            self._held[parameter] = held
            self.take_down(parameter)

    def forget_all(self, ids: Collection[int]) -> None:
        """:meth:`forget` for every parameter with one of these ids."""
        for parameter in list(self.handed_out):
            if id(parameter) in ids:
                self.forget(parameter)

    def take_down(self, parameter: torch.Tensor) -> None:
        """Note that somebody has access; what the parameter is at the first time is what counts."""
        if parameter not in self.handed_out:
            self.handed_out[parameter] = _checksums_of(parameter)

    def was_written(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter that was handed out is not what it was then. Waits for the device."""
        if parameter not in self.handed_out:
            return False
        before, now = self.handed_out[parameter], _checksums_of(parameter)
        if before is None or now is None:
            return before is not now
        return before.shape != now.shape or before.device != now.device or not torch.equal(before, now)

    def note_assigned(self, parameter: torch.Tensor) -> None:
        """Somebody assigns a parameter's gradient."""
        twin = self._twins.get(id(parameter))
        gradient = None if twin is None else twin.grad
        self.assigned[id(parameter)] = gradient, -1 if gradient is None else gradient._version

    def has_arrived_since(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Whether its twin's gradient is another, or was added to, since the parameter's was assigned."""
        before, version = self.assigned[id(parameter)]
        return gradient is not before or gradient._version != version

    def clear_twin(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is about to be cleared: its twin's with it, where the two are one.

        Not by an optimizer in its step.
        """
        twin = None if self.is_paused else self._twins.get(id(parameter))
        shown = self.arrived.get(id(parameter))
        one = shown.source if isinstance(shown, Shown) and shown.is_as_shown(parameter.grad) else parameter.grad
        if twin is not None and twin.grad is not None and twin.grad is one:
            TENSOR_GRAD.__set__(twin, None)
            self.cleared.add(id(parameter))
            self.arrived.pop(id(parameter), None)

    def close(self) -> None:
        """Stop watching everything."""
        self.handed_out.clear()
        self._held.clear()
        self._twins.clear()
        self.arrived.clear()
        _forget(self._ids)
        self._ids.clear()


def _checksums_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """None where nothing can be written: on the meta device, and to what holds no memory for its numbers."""
    values = TENSOR_DETACH(parameter)
    values = getattr(values, "_local_tensor", values)  # a shard knows of the writes to its part
    if values.device.type == "meta" or 0 in values.stride():
        return None
    return checksums(words_of(values))


def _forget(ids: set[int]) -> None:
    with _lock:
        for number in ids:
            _watchers.pop(number, None)
        if not _watchers and "data" in vars(nn.Parameter):
            for name in _MEMBERS:
                delattr(nn.Parameter, name)


def _watcher_of(parameter: torch.Tensor) -> Watcher | None:
    reference = _watchers.get(id(parameter))
    return None if reference is None else reference()


def _get_data(parameter: torch.Tensor) -> Any:
    watcher = _watcher_of(parameter)
    return TENSOR_DATA.__get__(parameter) if watcher is None else watcher.hand_out(parameter, TENSOR_DATA.__get__)


def _set_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    watcher = _watcher_of(parameter)
    if watcher is not None:
        watcher.take_down(parameter)
    TENSOR_DATA.__set__(parameter, value)


def _detach(parameter: torch.Tensor) -> Any:
    watcher = None if torch.compiler.is_compiling() else _watcher_of(parameter)
    return TENSOR_DETACH(parameter) if watcher is None else watcher.hand_out(parameter, TENSOR_DETACH)


_detach.__name__, _detach.__doc__ = "detach", torch.Tensor.detach.__doc__


def _set_grad(parameter: torch.Tensor, value: Any) -> None:
    watcher = _watcher_of(parameter)
    if watcher is not None and value is None:
        watcher.clear_twin(parameter)
    elif watcher is not None and isinstance(value, torch.Tensor):
        watcher.note_assigned(parameter)
        wanted = parameter.grad_dtype
        if wanted is not None and value.dtype != wanted and value.is_floating_point():
            value = value.to(wanted)
    TENSOR_GRAD.__set__(parameter, value)


def _delete_grad(parameter: torch.Tensor) -> None:
    watcher = _watcher_of(parameter)
    if watcher is not None:
        watcher.clear_twin(parameter)
    TENSOR_GRAD.__delete__(parameter)


_MEMBERS: Final[dict[str, Any]] = {
    "data": property(_get_data, _set_data, doc=torch.Tensor.data.__doc__),
    "grad": property(TENSOR_GRAD.__get__, _set_grad, _delete_grad, doc=torch.Tensor.grad.__doc__),
    "detach": _detach,
}
