"""The native autocast flag: which devices have one, and how to switch it on, off and back, cheaply.

The flag is the one truth for "casts are on": there is no flag of mpinit's own. torch keeps it per thread and per
device type. Beside it torch keeps, per thread, whether weight casts are cached, and this is the second half of the
state: a flag that is off while the cache is off too was switched off on purpose (:func:`disable_casts`, or a
``torch.autocast(enabled=False)`` in a thread whose flag mpinit had switched on), and the forward of an initialised
model then leaves it off. Whoever carries torch's autocast state elsewhere (checkpoint's recomputation, DataParallel's
threads) carries both halves.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

import torch

__all__ = ["CastsAs", "CastsOff", "ForwardCasts", "device_types", "disable_casts", "flags", "is_on", "set_flags"]

P = ParamSpec("P")
T = TypeVar("T")

# A plain global and not functools.cache: torch.compile reads globals, but steps around cached functions with a warning.
_devices: tuple[str, ...] = ()


def device_types() -> tuple[str, ...]:
    """The device types present in this process that have an autocast flag, "cpu" first.

    Example:
        >>> device_types()[0]
        'cpu'
    """
    global _devices
    if not _devices:
        # Of those present: a CUDA build names CUDA where there is no device too, and its autocast only warns there.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        has_flag = accelerator is not None and torch.amp.is_autocast_available(accelerator.type)
        _devices = ("cpu", accelerator.type) if accelerator is not None and has_flag else ("cpu",)
    return _devices


def is_on() -> bool:
    """Whether casts are on in this thread for any device present.

    Example:
        >>> with torch.autocast("cpu"):
        ...     is_on()
        True
    """
    return any(torch.is_autocast_enabled(device) for device in device_types())


def is_on_without_a_block() -> bool:
    """Whether casts are on in this thread though no ``torch.autocast`` block is open: a session has switched them on.

    Example:
        >>> with torch.autocast("cpu"):
        ...     is_on_without_a_block()
        False
    """
    if not is_on():
        return False
    nested = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    return not nested


class CastsOff:
    """Switches every autocast flag of this thread off inside the block and back on exit, whatever they were.

    Example:
        >>> with CastsOff():
        ...     torch.is_autocast_enabled("cpu")
        False
    """

    __slots__ = ("_were_on",)

    def __init__(self) -> None:
        self._were_on: list[tuple[str, ...]] = []

    def __enter__(self) -> CastsOff:
        were_on = tuple(device for device in device_types() if torch.is_autocast_enabled(device))
        self._were_on.append(were_on)
        for device in were_on:
            torch.set_autocast_enabled(device, False)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for device in self._were_on.pop():
            torch.set_autocast_enabled(device, True)


class CastsAs:
    """Puts every autocast flag of this thread to a remembered state inside the block and back on exit.

    Example:
        >>> with CastsAs({"cpu": True}):
        ...     torch.is_autocast_enabled("cpu")
        True
    """

    __slots__ = ("_before", "_state")

    def __init__(self, state: Mapping[str, bool]) -> None:
        self._state = state
        self._before: list[dict[str, bool]] = []

    def __enter__(self) -> CastsAs:
        self._before.append(flags())
        set_flags(self._state)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        set_flags(self._before.pop())


def flags() -> dict[str, bool]:
    """This thread's autocast flag for each device type present."""
    return {device: torch.is_autocast_enabled(device) for device in device_types()}


def set_flags(state: Mapping[str, bool]) -> None:
    """Set this thread's autocast flags to a state that :func:`flags` returned."""
    for device, on in state.items():
        torch.set_autocast_enabled(device, on)


class _CastsDisabled:
    """Flags off and cache off: casts that were switched off on purpose, which a model's forward leaves off."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, bool], bool]] = []

    def __enter__(self) -> None:
        self._before.append((flags(), torch.is_autocast_cache_enabled()))
        set_flags(dict.fromkeys(device_types(), False))
        torch.set_autocast_cache_enabled(False)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        state, cache = self._before.pop()
        set_flags(state)
        torch.set_autocast_cache_enabled(cache)


@contextlib.contextmanager
def _traced_casts_disabled() -> Iterator[None]:
    """The same, written with the one context manager of torch's that torch.compile can trace."""
    devices = device_types()
    first, last = devices[0], devices[-1]
    with (
        torch.autocast(first, enabled=False, cache_enabled=False),
        torch.autocast(last, enabled=False, cache_enabled=False),
    ):
        yield


def disable_casts() -> contextlib.AbstractContextManager[None]:
    """Run a block without casts, on every device, in any thread, inside and around initialised models.

    It wins over the forward of an initialised model called in the block. Inside a function compiled by torch.compile
    it is traced.

    Returns:
        A context manager; it may be entered inside another.

    Example:
        >>> import torch, mpinit
        >>> model = mpinit.initialize(torch.nn.Linear(4, 2), opt_level="O1", verbosity=0)
        >>> with mpinit.disable_casts():
        ...     torch.linalg.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype
        torch.float32
        >>> mpinit.undo(model)
    """
    return _traced_casts_disabled() if torch.compiler.is_compiling() else _CastsDisabled()


def call_without_casts(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function with every cast off, also where torch.compile traces the call."""
    if torch.compiler.is_compiling():
        with _traced_casts_disabled():
            return function(*args, **kwargs)
    with CastsOff():
        return function(*args, **kwargs)


class _Thread(threading.local):
    """What this thread's open :class:`ForwardCasts` blocks have to put back, outermost first."""

    def __init__(self) -> None:
        self.open: list[tuple[list[tuple[str, bool, torch.dtype]], bool]] = []


_thread: Final = _Thread()


class ForwardCasts:
    """Casts on around the forward of an initialised model, in any thread, weight casts cached until it ends.

    One object serves any number of models, threads and nested calls. For each device present, on entering:

    - flag on: it stays on, with this dtype;
    - flag off and weight-cast cache off: switched off on purpose, stays off;
    - flag off inside an open ``torch.autocast`` block of this thread: that block switched it off, it stays off,
      unless torch itself opened the block to carry state into a checkpoint's recomputation or a replica's thread;
    - flag off otherwise (a thread, or ``cast_scope="model"``, in which nobody switched it on): on, with this dtype.

    The cached weight casts are dropped when the thread's outermost block ends, so they never outlive a weight change
    made between two forwards. On exit everything is put back, after an exception too. torch.compile cannot trace a
    context manager that was made outside the compiled function: use :meth:`run` where the forward may be traced.

    Args:
        dtype: the 16-bit dtype.

    Example:
        >>> with ForwardCasts(torch.bfloat16):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """

    __slots__ = ("_dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __reduce__(self) -> tuple[type[ForwardCasts], tuple[torch.dtype]]:
        return (ForwardCasts, (self._dtype,))

    def __enter__(self) -> ForwardCasts:
        dtype = self._dtype
        caching = torch.is_autocast_cache_enabled()
        nested = torch.autocast_increment_nesting() > 1
        before = []
        any_on = False
        for device in _devices or device_types():
            on, dtype_before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            before.append((device, on, dtype_before))
            if not on and caching and (not nested or _carried_by_torch()):
                torch.set_autocast_enabled(device, True)
                on = True
            any_on = any_on or on
            if dtype_before is not dtype:
                torch.set_autocast_dtype(device, dtype)
                if nested:
                    torch.clear_autocast_cache()  # torch looks a cached cast up by weight alone, not by dtype
        torch.set_autocast_cache_enabled(any_on)
        _thread.open.append((before, caching))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        before, caching = _thread.open.pop()
        nesting = torch.autocast_decrement_nesting()
        clear = nesting == 0 or not _thread.open
        for device, on, dtype_before in before:
            torch.set_autocast_enabled(device, on)
            if dtype_before is not self._dtype:
                torch.set_autocast_dtype(device, dtype_before)
                clear = True
        if clear:
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(caching)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` inside this block; torch.compile(fullgraph=True) traces it.

        Example:
            >>> ForwardCasts(torch.float16).run(torch.mm, torch.ones(2, 2), torch.ones(2, 2)).dtype
            torch.float16
        """
        if torch.compiler.is_compiling():
            return _traced_run(self._dtype, function, *args, **kwargs)
        with self:
            return function(*args, **kwargs)


def _traced_run(dtype: torch.dtype, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """:meth:`ForwardCasts.run` under torch.compile, where the nesting of torch.autocast blocks cannot be read.

    The cache is off inside: the compiler merges equal casts by itself, and a block inside the graph that switches
    the flag off then counts as on purpose.
    """
    caching = torch.is_autocast_cache_enabled()
    devices = device_types()
    first, last = devices[0], devices[-1]
    first_on = caching or torch.is_autocast_enabled(first)
    last_on = caching or torch.is_autocast_enabled(last)
    with (
        torch.autocast(first, dtype=dtype, enabled=first_on, cache_enabled=False),
        torch.autocast(last, dtype=dtype, enabled=last_on, cache_enabled=False),
    ):
        return function(*args, **kwargs)


_CARRIERS: Final = ("torch/utils/checkpoint.py", "torch/nn/parallel/parallel_apply.py")


def _carried_by_torch() -> bool:
    """Whether torch opened an autocast block on this stack to carry another place's state here.

    Only asked in the rare case of an off flag inside an open block, so a walk up the stack is cheap enough.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith(_CARRIERS):
            return True
        frame = frame.f_back
    return False
