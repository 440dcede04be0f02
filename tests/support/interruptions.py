"""Interrupting mpinit at any line, as Ctrl-C does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpinit

_PACKAGE = str(Path(mpinit.__file__).parent) + "/"


class Interrupted(KeyboardInterrupt):
    """The interruption."""


class _Lines:
    """Counts lines of mpinit as they run, and raises before one of them, once."""

    def __init__(self, folders: tuple[str, ...], at: int | None) -> None:
        self.folders = folders
        self.at = at
        self.seen = 0

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename.removeprefix(_PACKAGE)
        if name == frame.f_code.co_filename or not name.startswith(self.folders):
            return None
        if event == "line":
            self.seen += 1
            if self.seen - 1 == self.at:
                self.at = None
                raise Interrupted(f"{name}:{frame.f_lineno}")
        return self.trace

    def run(self, action: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            action()
        finally:
            sys.settrace(before)


def count_lines(action: Callable[[], Any], *folders: str) -> int:
    """How many lines of mpinit (only those of some files or folders, if given) ``action`` runs, repetitions counted."""
    lines = _Lines(folders or ("",), None)
    lines.run(action)
    return lines.seen


def interrupt_at(line: int, action: Callable[[], Any], *folders: str) -> None:
    """Run ``action`` and raise :class:`Interrupted` before the given one of the lines :func:`count_lines` counts."""
    _Lines(folders or ("",), line).run(action)
