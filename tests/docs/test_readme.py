"""README: every Python block runs, the property table is the one in the code, and every link leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import mpinit

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Snippet:
    """A Python block, where it begins, under which heading, and the comment that marks it."""

    heading: str
    line: int
    mark: str
    source: str

    def run(self, namespace: dict[str, Any]) -> None:
        # Padded with empty lines, so that a traceback points into the README itself.
        exec(compile("\n" * self.line + self.source, str(README), "exec"), namespace)


def snippets() -> Iterator[Snippet]:
    heading, mark = "", ""
    lines = iter(enumerate(TEXT.splitlines(), start=1))
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
            yield Snippet(heading, number, mark, "\n".join(source))
            mark = ""


ALL = list(snippets())
PRELUDE = next(snippet for snippet in ALL if snippet.mark == "prelude")
EXAMPLES = [snippet for snippet in ALL if snippet is not PRELUDE]


def test_the_readme_has_its_snippets() -> None:
    assert len(EXAMPLES) == TEXT.count("```python") - 1 > 15


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def process_group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """A group of one process, for the snippets that are marked as needing one."""
    if request.getfixturevalue("snippet").mark != "one process, gloo":
        yield
        return
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("in_the_repository", "process_group")
@pytest.mark.parametrize("snippet", EXAMPLES, ids=lambda s: f"{s.heading or 'top'}, line {s.line}")
def test_a_snippet_runs(snippet: Snippet) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    PRELUDE.run(namespace)
    snippet.run(namespace)


def cell(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).removeprefix("torch.")


def test_the_property_table_is_the_one_in_the_code() -> None:
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]
    start = next(number for number, row in enumerate(rows) if row[0] == "property")
    assert rows[start][1:] == list(mpinit.OPT_LEVELS)
    for row in rows[start + 2 : start + 7]:
        name = row[0].strip("`")
        assert row[1:] == [cell(getattr(props, name)) for props in mpinit.OPT_LEVELS.values()]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)", TEXT))))
def test_a_link_leads_to_a_file(target: str) -> None:
    assert target.startswith("https://") or (ROOT / target).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)", TEXT))))
def test_every_make_target_exists(target: str) -> None:
    makefiles = [ROOT / "Makefile", ROOT / "examples" / "benchmarks" / "bench.mk"]
    assert any(re.search(rf"^{target}( [\w-]+)*:", path.read_text(encoding="utf-8"), re.M) for path in makefiles)
