"""Casts off while autograd's engine runs, and casts on for the thread that asked for them."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from ..basics.patching import UndoStack
from ..torch_internals.native_autocast import call_without_casts, device_types

_log: Final = logging.getLogger("mpinit")

# Where torch.autograd.backward and .grad, however they were imported, enter the engine; themselves where it is not.
_ENGINE: Final = ("_engine_run_backward",) if hasattr(torch.autograd, "_engine_run_backward") else ("backward", "grad")


def keep_casts_out_of_backward(undos: UndoStack) -> None:
    """Switch casts off while autograd's engine runs, for ``backward()`` and ``torch.autograd.grad`` alike.

    A backward pass under casts would compute what ran in float32 in 16 bits. A graph made by ``create_graph=True`` is
    the caller's to use: casts are back on when the call returns.
    """
    for name in _ENGINE:
        undos.set_attribute(torch.autograd, name, _without_casts(getattr(torch.autograd, name)))


def _without_casts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def engine_call(*args: Any, **kwargs: Any) -> Any:
        return call_without_casts(original, *args, **kwargs)

    return engine_call


class _Thread(threading.local):
    """The casts switched on for this thread: who asked for which dtype, and what stood before the first."""

    def __init__(self) -> None:
        self.asked: dict[_Request, torch.dtype] = {}
        self.before: list[tuple[str, bool, torch.dtype]] = []
        self.cache_before = True


_thread: Final = _Thread()

# Undone in another thread than their own: forgotten when that thread next comes by.
_undone_elsewhere: Final[set[_Request]] = set()


def switch_thread_on(dtype: torch.dtype, undos: UndoStack) -> None:
    """Switch casts on in the calling thread, for every device present, with the weight-cast cache off.

    The cache stays off because outside a forward nothing says when the weights change. The undo may come in any
    order among several; the dtype in force is that of the latest not undone. It works in the thread that asked.
    """
    request = _Request(threading.get_ident())
    if not _thread.asked:
        _thread.before = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in device_types()
        ]
        _thread.cache_before = torch.is_autocast_cache_enabled()
    _forget_undone_elsewhere()
    undos.push(request.undo)
    _thread.asked[request] = dtype
    _set_thread(dtype)


class _Request:
    """One session's casts in one thread; its undo can be interrupted and called again."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._is_undone = False

    def undo(self) -> None:
        if self._is_undone:
            return
        if threading.get_ident() != self._thread:
            _undone_elsewhere.add(self)
            _log.warning(
                "casts were switched on in another thread (%d) and stay on there: call mpinit.undo in the thread that "
                "called mpinit.initialize",
                self._thread,
            )
        else:
            _thread.asked.pop(self, None)
            _forget_undone_elsewhere()
            _switch_back()
        self._is_undone = True


def _forget_undone_elsewhere() -> None:
    for request in _undone_elsewhere & _thread.asked.keys():
        del _thread.asked[request]
        _undone_elsewhere.discard(request)


def _set_thread(dtype: torch.dtype) -> None:
    for device in device_types():
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(False)


def _switch_back() -> None:
    if _thread.asked:
        _set_thread(next(reversed(_thread.asked.values())))
        return
    for device, on, dtype in _thread.before:
        torch.set_autocast_enabled(device, on)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(_thread.cache_before)
