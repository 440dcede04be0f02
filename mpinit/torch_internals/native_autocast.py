"""The native autocast flag: which devices have one, and how to switch it on, off and back, cheaply.

The flag is the one truth for "casts are on": there is no flag of mpinit's own. torch keeps it per thread and per
device type. Beside it torch keeps, per thread, whether weight casts are cached, and this is the second half of the
state: a flag that is off while the cache is off too was switched off on purpose (:func:`disable_casts`, or a
``torch.autocast(enabled=False)`` in a thread whose flag mpinit had switched on), and the forward of an initialised
model then leaves it off. What carries torch's autocast state elsewhere (checkpoint's recomputation) carries
both halves.
"""

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

# A plain global and not functools.cache: torch.compile reads globals, but steps around cached functions with a warning.
_devices: tuple[str, ...] = ()


def device_types() -> tuple[str, ...]:
    """List the device types of this process that have an autocast flag, "cpu" first."""
    global _devices
    if not _devices:
        # Of those present: a CUDA build names CUDA where there is no device too, and its autocast only warns there.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        has_flag = accelerator is not None and torch.amp.is_autocast_available(accelerator.type)
        _devices = ("cpu", accelerator.type) if accelerator is not None and has_flag else ("cpu",)
    return _devices


def is_on() -> bool:
    """Return whether casts are on in this thread for any device present."""
    return any(map(torch.is_autocast_enabled, device_types()))


# What torch keeps for a thread: (device type, flag, dtype) for each device present; whether weight casts are cached.
State = tuple[list[tuple[str, bool, torch.dtype]], bool]


class Thread:
    """The autocast states that one thread's forwards and sessions restore at their end.

    Attributes:
        forwards: what each open ``ForwardCasts`` found, and how many autocast blocks are open outside of it and inside.
        asked: the sessions that have casts on in this thread, oldest first, and their dtypes.
        base: what stood before the first of them.
        has_ended: whether one has ended since then: a block that it ended in puts back what it had switched on.
    """

    def __init__(self) -> None:
        self.forwards: list[tuple[State, int, int]] = []
        self.asked: dict[ThreadCasts, torch.dtype] = {}
        self.base: State | None = None
        self.has_ended = False

    def begin(self, casts: "ThreadCasts", dtype: torch.dtype) -> None:
        if not self.asked:
            self.follow_ended()
            self.base, self.has_ended = present_state(), False
        self.asked[casts] = dtype
        self._set()

    def follow_ended(self) -> None:
        """Switch casts off that are on outside of every block although their session has ended."""
        if self.has_ended and is_on() and not open_autocast_blocks():
            self._set()

    def _set(self) -> None:
        dtypes = list(self.asked.values())
        if dtypes:
            put_back(([(device, True, dtypes[-1]) for device in device_types()], False))
        elif self.base is not None:
            put_back(self.base)


class _ThreadState(threading.local):
    """The calling thread's own :class:`Thread`, at ``thread_state.value``."""

    def __init__(self) -> None:
        self.value = Thread()


thread_state: Final = _ThreadState()


def present_state() -> State:
    """Read the calling thread's state."""
    on = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in device_types()]
    return on, torch.is_autocast_cache_enabled()


def put_back(state: State) -> None:
    """Set the calling thread's state. Flags are switched off last: until the state is complete, a flag is on."""
    for device, on, dtype in state[0]:
        if on:
            torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(state[1])
    for device, on, _ in state[0]:
        if not on:
            torch.set_autocast_enabled(device, False)


def open_autocast_blocks() -> int:
    """Count the ``torch.autocast`` blocks, and forwards with casts, that are open in this thread."""
    # torch returns the depth only when it changes it. Ctrl-C cannot come between two calls of one builtin function.
    return list(map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)))[-1]


class ThreadCasts:
    """A session's casts in the thread that makes this, with the weight-cast cache off, until the session ends.

    The cache stays off because nothing shows when weights change outside of a forward. The latest session that has not
    ended sets the dtype; sessions may end in any order.
    """

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self._thread = thread_state.value
        self._has_ended = False

    def begin(self, dtype: torch.dtype) -> None:
        """Switch casts on; :meth:`end` also reverses an interrupted call."""
        self._thread.begin(self, dtype)

    def end(self) -> bool:
        """Reverse :meth:`begin`; a second call completes an interrupted one.

        Inside a block of this thread the flags follow when it ends; in another thread, and in a block of
        ``torch.autocast``, when the thread next ends a backward pass, a step or the forward of an initialised model.
        """
        if self._has_ended:
            return True
        self._thread.asked.pop(self, None)
        self._thread.has_ended = True
        is_here = self._thread is thread_state.value
        if is_here:
            self._thread.follow_ended()
        self._has_ended = True
        return is_here


class CastsAs:
    """A block that sets every autocast flag of this thread to a remembered state, and restores it on exit.

    ``caching``: whether weight casts are cached inside; None: as they are.
    """

    __slots__ = ("_before", "_caching", "_flags")

    def __init__(self, state: Mapping[str, bool], caching: bool | None = None) -> None:
        self._flags = state
        self._caching = caching
        self._before: list[tuple[dict[str, bool], bool]] = []

    def __enter__(self) -> None:
        caching = torch.is_autocast_cache_enabled()
        self._before.append((flags(), caching))
        set_flags(self._flags)
        torch.set_autocast_cache_enabled(caching if self._caching is None else self._caching)

    def __exit__(self, *_: object) -> None:
        state, caching = self._before.pop()
        set_flags(state)
        torch.set_autocast_cache_enabled(caching)
        if thread_state.value.has_ended:
            thread_state.value.follow_ended()


class CastsOff(CastsAs):
    """A block that switches every autocast flag of this thread off, and restores them on exit."""

    __slots__ = ()

    def __init__(self, caching: bool | None = None) -> None:
        super().__init__(dict.fromkeys(device_types(), False), caching)


def flags() -> dict[str, bool]:
    """Read this thread's autocast flag for each device type present."""
    return {device: torch.is_autocast_enabled(device) for device in device_types()}


def set_flags(state: Mapping[str, bool]) -> None:
    """Set this thread's autocast flags to a state that :func:`flags` returned."""
    for device, on in state.items():
        torch.set_autocast_enabled(device, on)


@contextlib.contextmanager
def traced(on: Mapping[str, bool], dtype: torch.dtype | None, caching: bool) -> Iterator[None]:
    """Run a block with these flags; ``torch.autocast`` is the one context manager that torch.compile can trace."""
    devices = device_types()
    first, last = devices[0], devices[-1]
    with (
        torch.autocast(first, dtype=dtype, enabled=on[first], cache_enabled=caching),
        torch.autocast(last, dtype=dtype, enabled=on[last], cache_enabled=caching),
    ):
        yield


def _traced_off() -> contextlib.AbstractContextManager[None]:
    return traced(dict.fromkeys(device_types(), False), None, caching=False)


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
    # The cache goes off as well: by that a model's forward tells casts that were switched off on purpose.
    return _traced_off() if torch.compiler.is_compiling() else CastsOff(caching=False)


def call_without_casts(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function with every cast off, also where torch.compile traces the call."""
    with _traced_off() if torch.compiler.is_compiling() else CastsOff():
        return function(*args, **kwargs)
