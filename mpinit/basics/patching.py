"""Reversible changes: a patch is a record that can be reverted, and records are reverted in reverse order."""

import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Final, Self, TypeVar

_ABSENT: Final = object()

Undo = Callable[[], None]
Item = TypeVar("Item")


def for_each(function: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call a function with every item, also after it has raised; raise the first error at the end."""
    errors: list[BaseException] = []
    for item in items:
        try:
            function(item)
        except BaseException as error:
            errors.append(error)
    _raise_first(errors)


def _raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first error, with a note of each other one that says something else."""
    described = dict.fromkeys(f"{type(error).__name__}: {error}" for error in errors)
    for other in list(described)[1:]:
        errors[0].add_note(f"and {other}")
    if errors:
        raise errors[0]


def _reverting(owner: Any, name: str, only: Any = _ABSENT) -> Undo:
    before = vars(owner).get(name, _ABSENT)

    def revert() -> None:
        if only is not _ABSENT and vars(owner).get(name) is not only:
            return
        if before is _ABSENT:
            if name in vars(owner):
                delattr(owner, name)
        else:
            setattr(owner, name, before)

    return revert


class UndoStack:
    """Undo functions, unwound last in, first out; every one runs even when another raises.

    An undo is dropped only after it has run: a second call of :meth:`unwind` continues an interrupted one. So every
    undo has to be correct also after it ran before, in part or as a whole.

    As a context manager it unwinds where the block raises, and keeps the undos otherwise.
    """

    def __init__(self) -> None:
        self._undos: list[Undo] = []

    def push(self, undo: Undo) -> None:
        self._undos.append(undo)

    def set_attribute(self, owner: Any, name: str, value: Any, stays_wrapped: bool = False) -> None:
        """Set ``owner.name``; the undo puts back exactly what stood in the owner's own namespace.

        An inherited value is not copied into the instance: the undo deletes the name.
        ``stays_wrapped``: a value that others have set since stays.
        """
        self._undos.append(_reverting(owner, name, value if stays_wrapped else _ABSENT))
        setattr(owner, name, value)

    def forget(self, undo: Undo) -> None:
        """Remove an undo function that has been run; harmless where it is absent."""
        self._undos = [each for each in self._undos if each != undo]

    def __len__(self) -> int:
        return len(self._undos)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is not None:
            self.unwind()

    def unwind(self) -> None:
        """Run and forget every undo, newest first.

        One that raises is tried once more at once, since an interruption (Ctrl-C) comes only once; where it raises
        again it is kept for the next unwinding, and the older ones run all the same. The first error is raised after
        all have run; its notes have the others that were kept.
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


class InterruptsHeld:
    """A block that delays Ctrl-C to its end, in the main thread; other threads never get one."""

    __slots__ = ("_before", "_noted")

    def __enter__(self) -> None:
        self._noted: list[tuple[int, FrameType | None]] = []
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            for number, frame in self._noted[:1]:
                self._before(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append((number, frame))
