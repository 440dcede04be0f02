"""Interrupting mpinit at any line, as Ctrl-C does, or failing there."""

import dis
import functools
import gc
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import mpinit

PACKAGE = str(Path(mpinit.__file__).parent) + "/"
# A file of the package, a line, and which of its runs.
Where = tuple[str, int, int]


@functools.cache
def file_of(code: CodeType) -> str | None:
    """The name of the file below the package's folder; None for what is not of the package."""
    name = code.co_filename
    return name.removeprefix(PACKAGE) if name.startswith(PACKAGE) else None


@functools.cache
def _has_line(code: CodeType, number: int) -> bool:
    return any(line == number for _, _, line in code.co_lines())


def _ends_a_block(frame: Any) -> bool:
    """Return whether a ``with`` is about to end, or a ``finally`` to begin.

    Python looks for signals at calls and jumps back, of which there is none.
    """
    before, line = (linecache.getline(frame.f_code.co_filename, frame.f_lineno - back) for back in (1, 0))
    ends = dis.opname[frame.f_code.co_code[frame.f_lasti]] == "LOAD_CONST"
    return (ends and line.lstrip().startswith("with ")) or before.strip() == "finally:"


def _watch(action: Callable[[], Any], covers: Callable[[CodeType], bool], see: Callable[[Any], None]) -> None:
    """Run ``action``, and ``see`` with the frame before each line of the code that ``covers`` says yes to.

    No garbage is collected meanwhile: the lines that its weak references call belong to an earlier test.
    """

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not covers(frame.f_code):
            return None
        if event == "line":
            see(frame)
        return trace

    gc.disable()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
        gc.enable()


def count_runs(action: Callable[[], Any], covers: Callable[[str], bool]) -> dict[tuple[str, int], int]:
    """How often each line of the files that ``covers`` says yes to runs in ``action``, in the order of first runs."""
    runs: dict[tuple[str, int], int] = {}

    def see(frame: Any) -> None:
        if not _ends_a_block(frame):
            place = file_of(frame.f_code) or "", frame.f_lineno
            runs[place] = runs.get(place, 0) + 1

    _watch(action, functools.cache(lambda code: (name := file_of(code)) is not None and covers(name)), see)
    return runs


def raise_at(where: Where, action: Callable[[], Any], error: type[BaseException]) -> bool:
    """Run ``action`` and raise ``error(where)`` before one run of a line; returns False where that run never came."""
    name, number, left = where

    def see(frame: Any) -> None:
        nonlocal left
        if left and frame.f_lineno == number and not _ends_a_block(frame):
            left -= 1
            if left == 0:
                # Made here: an exception that this frame held would hold its own traceback, and all objects in it.
                raise error(where)

    _watch(action, lambda code: left > 0 and file_of(code) == name and _has_line(code, number), see)
    return left == 0


def places(action: Callable[[], Any], *folders: str, both: bool = True) -> Iterator[Where]:
    """The first and the last run of every line of some files or folders that ``action`` runs; or of each only one."""
    for index, ((name, number), count) in enumerate(count_runs(action, lambda name: name.startswith(folders)).items()):
        runs = sorted({1, count})
        yield from ((name, number, run) for run in (runs if both else runs[index % len(runs) :][:1]))


def interrupt(where: Where, action: Callable[[], Any]) -> None:
    """Ctrl-C at one run of a line."""
    with pytest.raises(KeyboardInterrupt):
        raise_at(where, action, KeyboardInterrupt)
