"""How results are shown: tables, by rich on a terminal where it is installed, plain elsewhere; or JSON."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..basics.tables import plain_table


def show_json(value: Any) -> None:
    """Print a value as JSON, in which infinities and nan, which it does not know, are null."""
    print(json.dumps(_finite(value), indent=1))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> None:
    """Print a table: coloured and fitted to the window on a terminal, plain text into a pipe or a file.

    Args:
        title: stands above it.
        head: the columns' names.
        rows: as many cells each.
        numbers: which columns are numbers.
    """
    table: Any = _rich("table") if sys.stdout.isatty() else None
    if table is None:
        print(f"{title}\n{plain_table(head, rows, numbers)}\n")
        return
    box: Any = _rich("box")
    drawn = table.Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    # Between columns there is a blank already: with many of them a window of 80 has no room for more.
    drawn.padding = (0, int(len(head) < 6), 0, 0)
    for index, name in enumerate(head):
        drawn.add_column(name, justify="right" if index in numbers else "left", overflow="fold", no_wrap=index == 0)
    text: Any = _rich("text")
    for row in rows:
        drawn.add_row(*(text.Text(str(cell)) for cell in row))
    _rich("console").Console().print(drawn)


@contextmanager
def progress(total: int, what: str) -> Iterator[Any]:
    """A bar on a terminal's stderr; nothing elsewhere.

    Yields:
        ``advance(words)``: one more is about to be done, described by these words.
    """
    bars: Any = _rich("progress") if sys.stderr.isatty() else None
    if bars is None:
        yield lambda words: print(f"{what}: {words}", file=sys.stderr) if sys.stderr.isatty() else None
        return
    console = _rich("console").Console(stderr=True)
    with bars.Progress(console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        started = False

        def advance(words: str) -> None:
            nonlocal started
            bar.update(task, description=f"{what}: {words}", advance=1 if started else 0)
            started = True

        yield advance


def _rich(module: str) -> Any:
    """A module of rich, or None where it is not installed."""
    try:
        return importlib.import_module(f"rich.{module}")
    except ImportError:
        return None
