"""Python blocks in Markdown pages: found, and run as if they were written where they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Snippet:
    """A Python block: the page, where it begins, under which heading, and the comment that marks it."""

    page: Path
    heading: str
    line: int
    mark: str
    source: str

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.heading or 'top'}, line {self.line}"

    def run(self, namespace: dict[str, Any]) -> None:
        # Padded with empty lines, so that a traceback points into the page itself.
        exec(compile("\n" * self.line + self.source, str(self.page), "exec"), namespace)


def snippets(page: Path) -> Iterator[Snippet]:
    """The blocks of one page, in order."""
    heading, mark = "", ""
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    for number, line in lines:
        if line.startswith("#"):
            heading = line.strip("# ")
        elif line.startswith("<!--"):
            mark = line.strip("<!-> ")
        elif line == "```python":
            source = []
            for _, inner in lines:
                if inner == "```":
                    break
                source.append(inner)
            yield Snippet(page, heading, number, mark, "\n".join(source))
            mark = ""


def blocks(page: Path) -> int:
    """How many Python blocks a page has, counted in another way."""
    return len(re.findall(r"^```python$", page.read_text(encoding="utf-8"), re.M))
