"""Output of results: text and tables of at most 80 columns, or JSON."""

import json
import math
import re
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

from ..basics.tables import plain_table

WIDTH: Final = 80


def show_json(value: Any) -> None:
    """Print a value as JSON; infinities and nan, which JSON does not have, become null."""
    print(json.dumps(_finite(value), indent=1))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_text(text: str) -> None:
    """Print lines; wrap those longer than 80 columns."""
    for line in text.splitlines():
        print("\n".join(wrapped(line, WIDTH)))


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap text at blanks to lines of at most ``width``; wrap a name without blanks after dots and underscores."""
    if len(indent + text) <= width:
        return [indent + text]
    wrapper = textwrap.TextWrapper(width, indent, indent, replace_whitespace=False, break_on_hyphens=False)
    breakable = text if " " in text else re.sub(r"([._])", "\\1\v", text)
    return [line.replace("\v", "") for line in wrapper.wrap(breakable)]


def show_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> None:
    """Print a table; if it is too wide, wrap the cells of its widest columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        room = [width - len(name) for name, width in zip(head, widths, strict=True)]
        if not any(room):
            break
        widths[max(range(len(widths)), key=lambda index: (room[index] > 0) * widths[index])] -= 1
    lines = [line for row in rows for line in zip_longest(*map(wrapped, row, widths), fillvalue="")]
    print(f"{title}\n{plain_table(head, lines, numbers)}\n")
