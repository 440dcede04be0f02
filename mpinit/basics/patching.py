"""Reversible patches of attributes, undos of objects that are dropped, and a block that delays Ctrl-C.

A patch does not keep its object alive.
"""

import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Final, Self, TypeVar

_ABSENT: Final = object()

Undo = Callable[[], None]
Item = TypeVar("Item")


def for_each(function: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call a function with every item, also after a call has raised; raise the first error at the end."""
    errors: list[BaseException] = []
    for item in items:
        try:
            function(item)
        except BaseException as error:
            errors.append(error)
    _raise_first(errors)


def _raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first error; its notes list the other errors with different texts."""
    described = dict.fromkeys(f"{type(error).__name__}: {error}" for error in errors)
    for other in list(described)[1:]:
        errors[0].add_note(f"and {other}")
    if errors:
        raise errors[0]


def _reverting(owner: Any, name: str, only: Any = _ABSENT) -> Undo:
    # The reference is weak, because an object that was freed needs no undo, and because the attribute may keep the
    # owner of this undo alive.
    before, known = vars(owner).get(name, _ABSENT), _reference(owner)
    is_ours = None if only is _ABSENT else _reference(only)

    def revert() -> None:
        owner = known()
        if owner is None:
            return
        if is_ours is not None and vars(owner).get(name, _ABSENT) is not is_ours():
            return
        if before is _ABSENT:
            if name in vars(owner):
                delattr(owner, name)
        else:
            setattr(owner, name, before)

    return revert


def _reference(value: Any) -> Callable[[], Any]:
    """Refer to an object, weakly where its type allows it."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


class UndoStack:
    """A stack of undo functions; :meth:`unwind` runs all of them, newest first, even if some raise.

    An undo is removed only after it has returned, so a second call of :meth:`unwind` continues an interrupted one.
    Therefore an undo must be correct also after it ran before, in part or as a whole.

    As a context manager it unwinds if the block raises, and does nothing otherwise.
    """

    def __init__(self) -> None:
        self._undos: list[Undo] = []

    def push(self, undo: Undo) -> None:
        self._undos.append(undo)

    def set_attribute(self, owner: Any, name: str, value: Any, stays_wrapped: bool = False) -> None:
        """Set ``owner.name``, and push the undo, which restores the owner's own namespace.

        If the value was inherited, the undo deletes the name.

        Args:
            owner: the object.
            name: the attribute's name.
            value: the new value.
            stays_wrapped: the undo does nothing if other code has set the attribute since. Default False.
        """
        self._undos.append(_reverting(owner, name, value if stays_wrapped else _ABSENT))
        setattr(owner, name, value)

    def discard(self, undo: Undo) -> None:
        """Remove an undo function that was run outside of :meth:`unwind`, if it is there."""
        self._undos = [each for each in self._undos if each != undo]

    def __len__(self) -> int:
        return len(self._undos)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is not None:
            self.unwind()

    def unwind(self) -> None:
        """Run and remove every undo, newest first.

        An undo that raises is called once more, because Ctrl-C interrupts it only once. If it raises again, it stays
        on the stack for the next call, and the older ones still run. The first error is raised at the end; its notes
        list the other errors.
        """
        first_error: BaseException | None = None
        kept: list[BaseException] = []
        for index in reversed(range(len(self._undos))):
            try:
                try:
                    self._undos[index]()
                except BaseException as error:
                    first_error = first_error or error
                    self._undos[index]()
            except BaseException as error:
                first_error = first_error or error
                kept.append(error)
            else:
                del self._undos[index]
        if first_error is not None:
            _raise_first([first_error, *kept])


# The undos of objects that were freed.
_waiting: Final[list[Undo]] = []
_undoing: Final = threading.RLock()


def undo_when_dropped(owner: object, undo: Undo, at_once: Callable[[], object] | None = None) -> Undo:
    """Let :func:`undo_dropped` call ``undo`` after ``owner`` was freed, unless the result is called before.

    Python frees an object at any line, in any thread: the garbage collector may run while torch iterates over a dict of
    hooks, and removing a hook from that dict makes torch raise ``OrderedDict mutated during iteration``. So nothing is
    removed at that moment. Until the undo runs, what it removes has to do nothing.

    Args:
        owner: the object.
        undo: the undo, which must not keep the owner alive.
        at_once: a function to call when the owner is freed; it must be safe at any line. Default None.

    Returns:
        A function that calls ``undo`` at once.
    """
    finalizer = weakref.finalize(owner, _wait, undo, at_once)
    finalizer.atexit = False

    def undo_now() -> None:
        undo()
        finalizer.detach()

    return undo_now


def _wait(undo: Undo, at_once: Callable[[], object] | None) -> None:
    _waiting.append(undo)
    if at_once is not None:
        at_once()


def undo_dropped() -> None:
    """Run the undos of all owners that were freed. One that raises, or is interrupted, is kept for the next call."""
    with _undoing:
        while _waiting:
            undo = _waiting[0]
            undo()
            _waiting.remove(undo)


class InterruptsDelayed:
    """A block in the main thread that delays Ctrl-C to its end. Other threads are never interrupted by it."""

    __slots__ = ("_before", "_received")

    def __enter__(self) -> None:
        self._received: list[tuple[int, FrameType | None]] = []
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._receive)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            for number, frame in self._received[:1]:
                self._before(number, frame)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append((number, frame))
