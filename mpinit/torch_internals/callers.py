"""Who called into torch: the nearest Python frame under an operation, and the name it called."""

import dis
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Final

import torch

_TORCH: Final = str(Path(torch.__file__).parent).replace("\\", "/")
# Between an operation and what watches operations.
_BETWEEN: Final = tuple(f"{_TORCH}/{name}" for name in ("_dynamo/", "_compile.py", "utils/_python_dispatch.py"))


@dataclass(frozen=True)
class Caller:
    """Where an operation was asked for; ``called`` is "float" in ``x.float()``, "" for an operator like ``@``."""

    file: str
    line: int
    called: str
    is_torch: bool


def caller_of_operation(watchers: tuple[str, ...]) -> Caller | None:
    """The nearest frame neither of a watcher's file nor between it and the operation; None in a thread of torch's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if not file.startswith(watchers) and not file.startswith(_BETWEEN):
            return Caller(file, frame.f_lineno, _called(frame.f_code, frame.f_lasti), file.startswith(_TORCH))
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def _called(code: CodeType, position: int) -> str:
    """The name that the instruction at ``position`` calls: what was loaded from where its call begins."""
    loaded: dict[tuple[int | None, int | None], str] = {}
    for instruction in dis.get_instructions(code):
        where = instruction.positions
        start = (where.lineno, where.col_offset) if where is not None else (None, None)
        if instruction.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST")):
            if instruction.offset < position:
                loaded[start] = str(instruction.argval)
        elif instruction.offset == position and instruction.opname.startswith("CALL"):
            return loaded.get(start, "")
    return ""
