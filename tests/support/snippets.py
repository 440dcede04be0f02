"""Python blocks in Markdown pages: found, and run as if they were written where they stand."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRINTS = "<!-- prints -->"
FRACTIONS = r"-?\b\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)\b|(?<=^session )\d+"
NUMBERS = r"[+-]?\b\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?\b"


@dataclass(frozen=True)
class Snippet:
    """A Python block: the page, where it begins, under which heading, the comment that marks it, and what it prints.

    What it prints stands behind it, marked too; None where the page does not show it.
    """

    page: Path
    heading: str
    line: int
    mark: str
    source: str
    printed: str | None

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.heading or 'top'}, line {self.line}"

    def packages(self) -> list[str]:
        """List the packages that it imports, but those that mpinit needs."""
        roots: dict[str, None] = {}
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, ast.Import):
                roots |= dict.fromkeys(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                roots[(node.module or "").split(".")[0]] = None
        return [name for name in roots if name not in {*sys.stdlib_module_names, "torch", "pydantic", "mpinit"}]

    def run(self, namespace: dict[str, Any]) -> None:
        # Padded with empty lines, so that a traceback points into the page itself.
        exec(compile("\n" * self.line + self.source, str(self.page), "exec"), namespace)


def snippets(page: Path) -> Iterator[Snippet]:
    """The blocks of one page, in order."""
    heading, mark = "", ""
    text = page.read_text(encoding="utf-8")
    lines = iter(enumerate(text.splitlines(), start=1))
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
            behind = "\n".join(text.splitlines()[number + len(source) + 1 :])
            shown = re.match(rf"\n{PRINTS}\n```text\n(.*?)\n```", behind, re.S)
            yield Snippet(page, heading, number, mark, "\n".join(source), shown[1] if shown else None)
            mark = ""


def blocks(page: Path) -> int:
    """How many Python blocks a page has, counted in another way."""
    return len(re.findall(r"^```python$", page.read_text(encoding="utf-8"), re.M))


def same_but_for_numbers(printed: str, shown: str) -> bool:
    """Whether two outputs have the same words and whole numbers; fractions differ between processors."""
    return words(printed) == words(shown)


def words(output: str, open_ones: str = FRACTIONS) -> list[list[str]]:
    """Each line's words, with some numbers left open, by default fractions and which session of the process it is."""
    return [re.sub(open_ones, "N", line).split() for line in output.strip().splitlines()]
