"""Casts off while autograd's engine runs, and casts on for the thread that asked for them."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from ..basics.patching import Undo, UndoStack, set_attribute
from ..torch_internals.native_autocast import call_without_casts, device_types, is_on

_log: Final = logging.getLogger("mpinit")

# Where torch.autograd.backward and .grad, however they were imported, enter the engine; themselves where it is not.
_ENGINE: Final = ("_engine_run_backward",) if hasattr(torch.autograd, "_engine_run_backward") else ("backward", "grad")


def keep_casts_out_of_backward() -> Undo:
    """Switch casts off while autograd's engine runs, for ``backward()`` and ``torch.autograd.grad`` alike.

    A backward pass under casts would compute what ran in float32 in 16 bits. A graph made by ``create_graph=True`` is
    the caller's to use: casts are back on when the call returns.
    """
    undos = UndoStack()
    for name in _ENGINE:
        undos.push(set_attribute(torch.autograd, name, _without_casts(getattr(torch.autograd, name))))
    return undos.unwind


def _without_casts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def engine_call(*args: Any, **kwargs: Any) -> Any:
        return call_without_casts(original, *args, **kwargs)

    return engine_call


def keep_casts_out_of_fused_layers() -> Undo:
    """Let attention and transformer layers take their ordinary path in evaluation while casts are on.

    The fused one computes a whole layer in one kernel, in one type, and knows no rows. torch leaves it by itself when
    CUDA's flag is on; here the same holds for every device.
    """
    original = torch.backends.mha.get_fastpath_enabled

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        # torch.compile makes kernels of its own, and cannot trace the original.
        return not torch.compiler.is_dynamo_compiling() and not is_on() and original()

    return set_attribute(torch.backends.mha, "get_fastpath_enabled", get_fastpath_enabled)


class _Thread(threading.local):
    """The casts switched on for this thread: who asked for which dtype, and what stood before the first."""

    def __init__(self) -> None:
        self.asked: dict[object, torch.dtype] = {}
        self.before: list[tuple[str, bool, torch.dtype]] = []
        self.cache_before = True


_thread: Final = _Thread()

# Undone in another thread than their own: forgotten when that thread next comes by.
_undone_elsewhere: Final[set[object]] = set()


def switch_thread_on(dtype: torch.dtype) -> Undo:
    """Switch casts on in the calling thread, for every device present, with the weight-cast cache off.

    The cache stays off because outside a forward nothing says when the weights change. The undo may come in any
    order among several; the dtype in force is that of the latest not undone. It works in the thread that asked.
    """
    token = object()
    if not _thread.asked:
        _thread.before = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in device_types()
        ]
        _thread.cache_before = torch.is_autocast_cache_enabled()
    _forget_undone_elsewhere()
    _thread.asked[token] = dtype
    _set_thread(dtype)
    asked_here = threading.get_ident()

    def undo() -> None:
        if threading.get_ident() != asked_here:
            _undone_elsewhere.add(token)
            _log.warning(
                "casts were switched on in another thread (%d) and stay on there: call mpinit.undo in the thread that "
                "called mpinit.initialize",
                asked_here,
            )
        elif _thread.asked.pop(token, None) is not None:
            _forget_undone_elsewhere()
            _switch_back()

    return undo


def _forget_undone_elsewhere() -> None:
    for token in _undone_elsewhere & _thread.asked.keys():
        del _thread.asked[token]
        _undone_elsewhere.discard(token)


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
