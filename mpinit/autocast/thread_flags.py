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
from collections.abc import Callable, Iterator
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


class ThreadAutocast:
    """The autocast states of one thread that its forwards and sessions restore at their end.

    Weight casts are not cached while a session has casts on, because weights may change outside of a forward without
    notice. The latest session that has not ended sets the dtype; sessions may end in any order.

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
        self.thread_id = threading.get_ident()
        self.forwards: list[tuple[State, int, int]] = []
        self.sessions: dict[object, torch.dtype] = {}
        self.base: State | None = None
        self.base_blocks = 0
        self.has_ended = False

    def begin(self, session: object, dtype: torch.dtype) -> None:
        """Switch the casts of a session on. After an interrupted call, :meth:`end` reverses it."""
        if not self.sessions:
            self.restore_after_ended_session()
            self.base, self.base_blocks, self.has_ended = present_state(), self._users_blocks(), False
        self.sessions[session] = dtype
        self._set()

    def end(self, session: object) -> bool:
        """Reverse :meth:`begin`; a second call completes an interrupted one.

        Inside a block of mpinit in this thread, the flags are switched off when the block ends. In another thread, or
        in a ``torch.autocast`` block, they are switched off later: when that thread next ends a backward pass, a step
        or the forward of an initialised model. ``mpinit.undo`` is refused in such a block, because a backward pass
        after it ends no casts.

        Returns:
            False if the casts of the session were on, in another thread.
        """
        was_on = self.sessions.pop(session, None) is not None
        self.has_ended = True
        if self is not thread_state.value:
            return not was_on
        self.restore_after_ended_session()
        return True

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


class CastsAs:
    """A block with the autocast state of another moment in this thread; without one, with casts off on every device.

    Args:
        state: what :func:`present_state` returned. Default None: casts off.
        caching: whether weight casts are cached inside. Default None: as before the block.
    """

    __slots__ = ("_before", "_caching", "_state")

    def __init__(self, state: State | None = None, caching: bool | None = None) -> None:
        self._state, self._caching = state, caching
        self._before: list[State] = []

    def __enter__(self) -> None:
        before = present_state()
        self._before.append(before)
        off = [(device, False, dtype) for device, _, dtype in before[0]]
        set_state(self._state or (off, before[1] if self._caching is None else self._caching))

    def __exit__(self, *_: object) -> None:
        set_state(self._before.pop())
        if thread_state.value.has_ended:
            thread_state.value.restore_after_ended_session()


@contextlib.contextmanager
def traced(on: bool, dtype: torch.dtype | None = None, caching: bool = False) -> Iterator[None]:
    """Run a block with casts on or off, by ``torch.autocast``, which is all that torch.compile can trace."""
    devices = device_types()
    with (
        torch.autocast(devices[0], dtype=dtype, enabled=on, cache_enabled=caching),
        torch.autocast(devices[-1], dtype=dtype, enabled=on, cache_enabled=caching),
    ):
        yield


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
    return traced(False) if torch.compiler.is_compiling() else CastsAs(caching=False)


def call_without_casts(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function with all casts off; torch.compile can trace the call."""
    with traced(False) if torch.compiler.is_compiling() else CastsAs():
        return function(*args, **kwargs)
