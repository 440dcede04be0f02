"""Reversible changes: a patch is a record that can be reverted, and records are reverted in reverse order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_ABSENT: Final = object()

Undo = Callable[[], None]


def set_attribute(owner: Any, name: str, value: Any) -> Undo:
    """Set ``owner.name`` and return a function that puts back exactly what stood in the owner's own namespace.

    What was only inherited (from a class, or a base class) is not copied down: reverting deletes the name again.

    Example:
        >>> import types
        >>> box = types.SimpleNamespace(a=1)
        >>> revert = set_attribute(box, "a", 2)
        >>> revert(); box.a
        1
    """
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)

    def revert() -> None:
        if before is _ABSENT:
            if name in vars(owner):
                delattr(owner, name)
        else:
            setattr(owner, name, before)

    return revert


class UndoStack:
    """Undo functions, unwound last in, first out; every one runs even when another raises.

    As a context manager it unwinds where the block raises, and keeps everything where it does not.
    """

    def __init__(self) -> None:
        self._undos: list[Undo] = []

    def push(self, undo: Undo) -> None:
        """Remember one undo function."""
        self._undos.append(undo)

    def __len__(self) -> int:
        return len(self._undos)

    def __enter__(self) -> UndoStack:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is not None:
            self.unwind()

    def unwind(self) -> None:
        """Run and forget every undo, newest first. The first error is raised after all have run."""
        first_error: BaseException | None = None
        while self._undos:
            try:
                self._undos.pop()()
            except BaseException as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
