"""torch's autocast flags: the devices that have one, and functions that switch them on and off and restore them.

Casts are on if torch's flag is on; mpinit has no flag of its own. torch has one flag per thread and device type. Per
thread it also has a flag that enables the cache of weight casts. mpinit uses the two together:

- Autocast off, cache on: nobody switched casts on in this thread. The forward of an initialised model switches them on.
- Autocast off, cache off: the user switched casts off, by :func:`disable_casts`, or by
  ``torch.autocast(enabled=False)`` in a thread where mpinit had switched them on. The forward of an initialised model
  does not switch them on.

Code that restores torch's autocast state elsewhere, such as a checkpoint's recomputation, restores both flags.
"""

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

# A global, not functools.cache: torch.compile reads globals, but warns about cached functions.
_devices: tuple[str, ...] = ()


def device_types() -> tuple[str, ...]:
    """List the device types of this process that have an autocast flag, "cpu" first."""
    global _devices
    if not _devices:
        # Only if it is present: a CUDA build without a device names CUDA too, and its autocast only warns.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        has_flag = accelerator is not None and torch.amp.is_autocast_available(accelerator.type)
        _devices = ("cpu", accelerator.type) if accelerator is not None and has_flag else ("cpu",)
    return _devices


def is_on() -> bool:
    """Return whether casts are on in this thread for any device present."""
    return any(map(torch.is_autocast_enabled, device_types()))


# A thread's state: (device type, flag, dtype) for each device present, and whether weight casts are cached.
State = tuple[list[tuple[str, bool, torch.dtype]], bool]


class ThreadAutocast:
    """The autocast states of one thread that its forwards and sessions restore at their end.

    Attributes:
        forwards: for each open ``ForwardCasts``: the state before it, and the number of open autocast blocks outside
            and inside of it.
        sessions: the sessions with casts on in this thread, oldest first, and their dtypes.
        base: the state before the first session.
        base_blocks: the number of the user's open autocast blocks at that time.
        has_ended: whether a session has ended since then. If it ended inside a block, the block's end switches its
            casts on again.
    """

    def __init__(self) -> None:
        self.forwards: list[tuple[State, int, int]] = []
        self.sessions: dict[ThreadCasts, torch.dtype] = {}
        self.base: State | None = None
        self.base_blocks = 0
        self.has_ended = False

    def begin(self, casts: "ThreadCasts", dtype: torch.dtype) -> None:
        if not self.sessions:
            self.restore_after_ended_session()
            self.base, self.base_blocks, self.has_ended = present_state(), self._users_blocks(), False
        self.sessions[casts] = dtype
        self._set()

    def restore_after_ended_session(self) -> None:
        """Restore the autocast flags, if a session ended inside an autocast block whose exit set them again."""
        if self.has_ended and is_on() and not open_autocast_blocks():
            self._set()

    def has_later_block(self) -> bool:
        """Return whether the user has opened an autocast block since the first session: its end restores casts."""
        return bool(self.sessions) and self._users_blocks() > self.base_blocks

    def _users_blocks(self) -> int:
        return open_autocast_blocks() - sum(inside - outside for _, outside, inside in self.forwards)

    def _set(self) -> None:
        dtypes = list(self.sessions.values())
        if dtypes:
            set_state(([(device, True, dtypes[-1]) for device in device_types()], False))
        elif self.base is not None:
            set_state(self.base)


class _ThreadState(threading.local):
    """The calling thread's own :class:`ThreadAutocast`, at ``thread_state.value``."""

    def __init__(self) -> None:
        self.value = ThreadAutocast()


thread_state: Final = _ThreadState()


def present_state() -> State:
    """Read the calling thread's state."""
    on = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in device_types()]
    return on, torch.is_autocast_cache_enabled()


def set_state(state: State) -> None:
    """Set the calling thread's state.

    Flags are switched off last, so that a flag is on until the state is complete, also if Ctrl-C interrupts the call.
    """
    for device, on, dtype in state[0]:
        if on:
            torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(state[1])
    for device, on, _ in state[0]:
        if not on:
            torch.set_autocast_enabled(device, False)


def open_autocast_blocks() -> int:
    """Count the ``torch.autocast`` blocks and the forwards with casts that are open in this thread."""
    # torch returns the depth only when it changes it. A KeyboardInterrupt cannot be raised between two builtin calls
    # of one map.
    return list(map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)))[-1]


class ThreadCasts:
    """The casts of a session in the thread that creates this object, until the session ends.

    The cache of weight casts is off, because weights may change outside of a forward without notice. The latest
    session that has not ended sets the dtype; sessions may end in any order.
    """

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self._thread = thread_state.value
        self._has_ended = False

    def begin(self, dtype: torch.dtype) -> None:
        """Switch casts on. After an interrupted call, :meth:`end` reverses it."""
        self._thread.begin(self, dtype)

    def end(self) -> bool:
        """Reverse :meth:`begin`; a second call completes an interrupted one.

        Inside a block of mpinit in this thread, the flags are switched off when the block ends. In another thread, or
        in a ``torch.autocast`` block, they are switched off later: when that thread next ends a backward pass, a step
        or the forward of an initialised model. ``mpinit.undo`` is refused in such a block, because a backward pass
        after it ends no casts.

        Returns:
            True if it was called in the thread that began.
        """
        if self._has_ended:
            if self._thread is thread_state.value:
                # The first call may have been in a block that has ended since.
                self._thread.restore_after_ended_session()
            return True
        self._thread.sessions.pop(self, None)
        self._thread.has_ended = True
        is_here = self._thread is thread_state.value
        if is_here:
            self._thread.restore_after_ended_session()
        self._has_ended = True
        return is_here


class CastsAs:
    """A block that sets every autocast flag of this thread, and restores the flags on exit.

    Args:
        state: device type -> flag.
        caching: whether weight casts are cached inside. Default None: as before.
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
            thread_state.value.restore_after_ended_session()


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
    """Run a block with these flags, by ``torch.autocast``, the only context manager that torch.compile can trace."""
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
    """Run a block without casts, on every device, also in the forward of an initialised model called in the block.

    It can be used in any thread, inside a model's forward, and inside a function compiled by torch.compile.

    Returns:
        A context manager, which can be nested.

    Example:
        >>> import torch, mpinit
        >>> model = mpinit.initialize(torch.nn.Linear(4, 2), opt_level="O1")
        >>> with mpinit.disable_casts():
        ...     torch.linalg.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype
        torch.float32
        >>> mpinit.undo(model)
    """
    # The cache is switched off too: that is how a model's forward sees that the user switched casts off.
    return _traced_off() if torch.compiler.is_compiling() else CastsOff(caching=False)


def call_without_casts(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function with all casts off; torch.compile can trace the call."""
    with _traced_off() if torch.compiler.is_compiling() else CastsOff():
        return function(*args, **kwargs)
