"""Progress of a run: a bar on a terminal, and a line for each epoch elsewhere, as in a log file."""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import Any, Self

import tqdm


class Progress:
    """A context manager around a run; ``step`` and ``epoch`` are called in it.

    Warnings in it are printed above the bar, which would otherwise be torn.
    """

    def __init__(self, name: str, epochs: int, steps: int) -> None:
        self.name, self.epochs, self.done = name, epochs, 0
        self.bar: Any = tqdm.tqdm(total=epochs * steps, desc=name, unit="step", disable=not sys.stderr.isatty())
        self.shows_warning = warnings.showwarning

    def __enter__(self) -> Self:
        warnings.showwarning = self._above  # type: ignore[assignment]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        warnings.showwarning = self.shows_warning
        self.bar.close()

    def step(self) -> None:
        """Move the bar by a step."""
        self.bar.update()

    def epoch(self, **numbers: str) -> None:
        """Show numbers at the end of an epoch."""
        self.done += 1
        self.bar.set_postfix(numbers)
        if self.bar.disable:
            shown = ", ".join(f"{name} {number}" for name, number in numbers.items())
            print(f"{self.name} epoch {self.done} of {self.epochs}: {shown}", file=sys.stderr, flush=True)

    def _above(self, message: Any, category: type, filename: str, line: int, *_: Any) -> None:
        text = warnings.formatwarning(message, category, filename, line)  # type: ignore[arg-type]
        self.bar.write(text, file=sys.stderr, end="")
