"""README: every Python block runs, the property table is the one in the code, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from frameworks import names_for
from snippets import Snippet, blocks, snippets

import mpinit

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


ALL = list(snippets(README))
PRELUDE = next(snippet for snippet in ALL if snippet.mark == "prelude")
EXAMPLES = [snippet for snippet in ALL if snippet is not PRELUDE]


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 200


def test_a_framework_takes_six_lines() -> None:
    frameworks = [snippet for snippet in ALL if "mpinit.integrations" in snippet.source]
    assert len(frameworks) == 4
    assert all(len(snippet.source.splitlines()) <= 6 for snippet in frameworks)


def test_the_readme_has_its_snippets() -> None:
    assert len(EXAMPLES) == blocks(README) - 1 >= 4


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


# Lightning's data loading asks torch's pytree so, and would like processes of its own.
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.usefixtures("in_the_repository")
@pytest.mark.parametrize("snippet", EXAMPLES, ids=str)
def test_a_snippet_runs(snippet: Snippet, tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    PRELUDE.run(namespace)
    namespace |= names_for(snippet.mark, tmp_path)
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
    makefiles = [ROOT / "Makefile", ROOT / "benchmarks" / "bench.mk"]
    assert any(re.search(rf"^{target}( [\w-]+)*:", path.read_text(encoding="utf-8"), re.M) for path in makefiles)
