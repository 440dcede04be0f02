"""The pages: snippets run, links lead somewhere, generated parts and measured figures are up to date."""

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import NEEDED_BY_MARK, let_torchvision_load, marks_for, names_for
from snippets import PRINTS, Snippet, blocks, same_but_for_numbers, snippets

import mpinit
from mpinit import cli

ROOT = Path(__file__).parents[2]
let_torchvision_load()
PACKAGE, DOCS, README = ROOT / "mpinit", ROOT / "docs", ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
GENERATOR = runpy.run_path(str(DOCS / "generate.py"))
# These blocks have tests of their own: tests/compat/test_migration_page.py, tests/integrations/test_recipes.py.
APART = ("migrate.md", "recipes.md")
ALL = [snippet for page in PAGES if page.name not in APART for snippet in snippets(page)]
# The beginning that the others share: the README's own, and the site's.
PRELUDES = {snippet.page == README: snippet for snippet in ALL if snippet.mark == "prelude"}
EXAMPLES = [snippet for snippet in ALL if snippet.mark != "prelude"]


def as_case(snippet: Snippet) -> Any:
    """Return a parameter of a test; what frameworks are needed for is a long test."""
    packages = [*snippet.packages(), *filter(None, [NEEDED_BY_MARK.get(snippet.mark)])]
    return pytest.param(snippet, marks=marks_for(*packages) if packages else (), id=str(snippet))


BY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture
def process_group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """A group of one process, for the snippets that are marked as needing one."""
    if request.getfixturevalue("snippet").mark != "one process, gloo":
        yield
        return
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_every_block_is_found() -> None:
    assert len(ALL) == sum(blocks(page) for page in PAGES if page.name not in APART)


# Lightning's data loading asks torch's pytree so, and would like processes of its own.
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("snippet", [*map(as_case, EXAMPLES)])
def test_a_snippet_runs_and_prints_what_the_page_shows(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    PRELUDES[snippet.page == README].run(namespace)
    namespace |= names_for(snippet.mark, tmp_path)
    for earlier in gone_before(snippet):
        earlier.run(namespace)
    capsys.readouterr()
    snippet.run(namespace)
    printed = capsys.readouterr().out
    assert snippet.printed is None or same_but_for_numbers(printed, snippet.printed), printed


def test_every_output_follows_a_snippet() -> None:
    marks = sum(text.count(PRINTS) for text in TEXTS.values())
    assert marks == sum(snippet.printed is not None for snippet in ALL)


def gone_before(snippet: Snippet) -> list[Snippet]:
    """What a reader has typed before a snippet that is marked as going on: those since the last that starts afresh."""
    found: list[Snippet] = []
    for earlier in EXAMPLES[: EXAMPLES.index(snippet) + 1]:
        found = [*found, earlier] if earlier.mark == "goes on" else [earlier]
    return found[:-1]


@pytest.mark.parametrize("name", sorted(GENERATOR["MADE"]))
def test_generated_page_is_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # argparse wraps to the terminal
    made = GENERATOR["MADE"][name]()
    assert (DOCS / name).read_text(encoding="utf-8") == made, "run: python docs/generate.py"


def test_every_public_name_is_on_the_reference_page() -> None:
    listed = {name for names in GENERATOR["GROUPS"].values() for name in names}
    public = set(mpinit.__all__) - {"__version__", "amp", "OPT_LEVELS"}
    assert not public - listed
    plugs = {path.stem for path in (PACKAGE / "integrations").glob("*.py")} - {"__init__"}
    assert not plugs - {name.split(".")[1] for name in listed if name.startswith("integrations.")}


def links(page: Path) -> set[Path]:
    """The pages that a page links to, in its text or in its table of contents."""
    text = TEXTS[page]
    named: list[str] = re.findall(r"\]\(([^)#\s]+\.md)", text)
    for block in re.findall(r"```\{toctree\}(.*?)```", text, re.S):
        named += [f"{line}.md" for line in block.split("\n") if line and not line.startswith(":")]
    return {(page.parent / target).resolve() for target in named}


@BY_PAGE
def test_links_lead_to_files_and_every_page_is_reached(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", TEXTS[page]):
        assert target.startswith("https://") or (page.parent / target).exists(), target
        outside = target.endswith(".md") and not (page.parent / target).resolve().is_relative_to(DOCS)
        assert page == README or not outside, f"{target}: the site has no page for it"
    assert page in (README, DOCS / "index.md") or page in links(DOCS / "index.md")


# A command at the beginning of a line of a block, or behind torchrun's -m.
COMMANDS = [
    command
    for page in PAGES
    if page.stem != "cli"
    for block in re.findall(r"^```(?:bash|text)$(.*?)^```$", TEXTS[page], re.M | re.S)
    for command in re.findall(r"^(?:torchrun .* -m )?mpinit (.+)", block, re.M)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_that_a_page_gives_it(command: str) -> None:
    words = shlex.split(command, comments=True)
    # The words after a script's name are the script's own.
    end = next(
        (index for index, word in enumerate(words) if word.endswith(".py") or word == "package.train"), len(words)
    )
    assert cli._parser().parse_args(words[: end + 1]).command == words[0]


def test_a_decay_of_0_999_does_not_change_a_bfloat16_average() -> None:
    weight, average = torch.tensor([1.01], dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    assert torch.equal(average.clone().mul_(0.999).add_(weight, alpha=0.001), average)
    with pytest.raises(RuntimeError, match="expected dtype float for `end` but got dtype c10::BFloat16"):
        average.float().lerp_(weight, 0.001)


def anchors(page: Path) -> set[str]:
    """Return the anchors that a repository's page has for its headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = [re.sub(r"[*`]|\]\(.*?\)|\[", "", title).lower() for title in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}


# `make docs` compares the anchors of the site; those of api.md are autodoc's.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "api.md"], ids=lambda page: page.name)
def test_anchors_hold_on_a_repository_page(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", TEXTS[page]):
        if not target.endswith("api.md"):
            assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


def test_tour_runs_from_top_to_bottom_as_package_check_runs_it() -> None:
    source = runpy.run_path(str(ROOT / ".ci/package.py"))["tour"]()
    assert source.startswith("import torch") and "mpinit.float32_weights" in source
    exec(compile(source, "README's tour", "exec"), {"__name__": "__main__"})


def cell(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).removeprefix("torch.")


def test_the_property_table_is_the_one_in_the_code() -> None:
    lines = [line.strip("|").split("|") for line in TEXTS[README].splitlines() if line.startswith("|")]
    rows = [[part.strip() for part in line] for line in lines]
    start = next(number for number, row in enumerate(rows) if row[0] == "property")
    assert rows[start][1:] == list(mpinit.OPT_LEVELS)
    for row in rows[start + 2 : start + 7]:
        name = row[0].strip("`")
        assert row[1:] == [cell(getattr(props, name)) for props in mpinit.OPT_LEVELS.values()]


MAP = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([a-z_]+/[\w/.]*|[a-z_]+\.py)", MAP))))
def test_files_that_contributing_names_exist(path: str) -> None:
    assert (ROOT / path).exists() or (PACKAGE / path).exists()


def test_make_has_the_targets_that_readme_and_contributing_name() -> None:
    makefiles = "".join((ROOT / name).read_text("utf-8") for name in ("Makefile", "benchmarks/bench.mk"))
    named = re.findall(r"\bmake ([a-z-]+)", TEXTS[README] + (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert not set(named) - {name for line in re.findall(r"^[\w -]+(?=:)", makefiles, re.M) for name in line.split()}


@pytest.mark.parametrize("page", ["docs/how-to/sixteen-bit-checkpoint.md", "docs/explanation/masters.md"])
def test_the_table_of_masters_is_that_of_the_file(page: str) -> None:
    made = runpy.run_path(str(DOCS / "masters_figure.py"))
    shown = made["worth" if page == "docs/explanation/masters.md" else "worth_in_short"]().strip()
    assert shown in TEXTS[ROOT / page], "run: python docs/masters_figure.py"
