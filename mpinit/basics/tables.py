"""Tables and numbers as plain text."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

# How many names a message lists where none is near: a model has hundreds.
_LISTED: Final = 30


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Format a table: columns as wide as their widest cell, two blanks apart."""
    cells = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, cells)])


def counted(count: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return what to append to a message about an unknown name: the nearest known one, or those that there are."""
    near = difflib.get_close_matches(name, known, n=1)
    listed = [*known[:_LISTED], *(["and others"] if len(known) > _LISTED else [])]
    return f"; did you mean {near[0]!r}?" if near else f". There are: {', '.join(listed) or 'none'}"


def bytes_text(count: float) -> str:
    """Format a number of bytes in B, KiB, MiB or GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
