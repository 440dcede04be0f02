"""The pages: links, figures, messages and the map for contributors.

Below the public face: pages are compared with the tables that they are generated from.
"""

import functools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import NEEDED_BY_MARK, let_torchvision_load, marks_for, names_for, needs
from snippets import PRINTS, Snippet, blocks, same_but_for_numbers, snippets

import mpinit
import mpinit.plan
from mpinit import cli
from mpinit.basics import logs
from mpinit.torch_internals import native as native_code

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import messages  # noqa: E402

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
    assert len(ALL) == sum(blocks(page) for page in PAGES if page.name not in APART) > 35


# Lightning's data loading asks torch's pytree so, and would like processes of its own.
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("snippet", [*map(as_case, EXAMPLES)])
def test_a_snippet_runs_and_prints_what_the_page_shows(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    # As on a machine where `mpinit build-native` was not run.
    monkeypatch.delenv("MPINIT_NATIVE")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(native_code, "_module", None)
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
    assert marks == sum(snippet.printed is not None for snippet in ALL) >= 3


def gone_before(snippet: Snippet) -> list[Snippet]:
    """What a reader has typed before a snippet that is marked as going on: those since the last that starts afresh."""
    found: list[Snippet] = []
    for earlier in EXAMPLES[: EXAMPLES.index(snippet) + 1]:
        found = [*found, earlier] if earlier.mark == "goes on" else [earlier]
    return found[:-1]


def test_a_tutorial_can_be_typed_from_top_to_bottom() -> None:
    tutorial = [snippet for snippet in EXAMPLES if snippet.page.stem == "from-float32-to-o2"]
    assert gone_before(tutorial[-1]) == tutorial[:-1] and len(tutorial) == 5


@BY_PAGE
def test_code_fits_a_window(page: Path) -> None:
    code = re.findall(r"^```(?:python|bash)$(.*?)^```$", TEXTS[page], re.M | re.S)
    assert not [line for block in code for line in block.splitlines() if len(line) > 100]


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


def test_every_row_of_the_reference_page_leads_to_a_heading_of_its_own() -> None:
    page = TEXTS[DOCS / "reference/api.md"]
    led_to = re.findall(r"^\| \[`\w+`\]\(#(\S+)\)", page, re.M)
    headings = [title.lower().replace(" ", "-") for title in re.findall(r"^### (.+)$", page, re.M)]
    assert led_to == headings and len(set(led_to)) == len(led_to) > 40


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


def test_names_in_tables_break_between_their_words_only() -> None:
    nodes = needs("docutils.nodes")
    cell = nodes.entry("", nodes.literal("", "mpinit.stuck(optimizer, n_steps=3)"), nodes.literal("", ".plot()"))
    runpy.run_path(str(DOCS / "conf.py"))["_let_long_names_break"](None, nodes.table("", cell), "page")
    pieces = [[str(part) for part in literal.findall(nodes.Text)] for literal in cell.findall(nodes.literal)]
    shown = [[piece for piece in found if piece != "<wbr>"] for found in pieces]
    assert shown == [["mpinit.", "stuck(", "optimizer, n_", "steps=3)"], [".plot()"]]


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
    own, _ = cli._split(shlex.split(command, comments=True))
    assert cli._parser().parse_args(own).command == own[0]


def test_commands_are_found() -> None:
    assert {command.split()[0] for command in COMMANDS} == set(cli.COMMANDS)


def test_the_readme_is_short() -> None:
    assert len(TEXTS[README].splitlines()) <= 200


def test_the_first_screen_answers_what_it_is_for() -> None:
    screen = "\n".join(TEXTS[README].splitlines()[:40])
    for part in (
        'mpinit.initialize(model, optimizer, opt_level="O5", master_weights="split")',
        "weights that never moved",
        "with masters, all of it",
        "mpinit audit",
        '`opt_level="O2"`',
        "apex",
    ):
        assert part in screen, part


def test_a_decay_of_0_999_does_not_change_a_bfloat16_average() -> None:
    weight, average = torch.tensor([1.01], dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    assert torch.equal(average.clone().mul_(0.999).add_(weight, alpha=0.001), average)
    with pytest.raises(RuntimeError, match="expected dtype float for `end` but got dtype c10::BFloat16"):
        average.float().lerp_(weight, 0.001)


def test_the_home_has_eight_entries_and_leaves_the_list_of_messages_to_searches() -> None:
    home = TEXTS[DOCS / "index.md"]
    assert len(re.findall(r"^\| [a-z].* \| \[.*\]\(", home, re.M)) == 8
    toctrees = "".join(re.findall(r"```\{toctree\}(.*?)```", home, re.S))
    assert "all-messages" not in toctrees and "(reference/all-messages.md)" in home
    assert TEXTS[DOCS / "reference/all-messages.md"].startswith("---\norphan: true\n---\n")


def test_the_decision_tree_asks_eight_questions_and_the_glossary_is_sorted() -> None:
    questions = re.findall(r"^## (\d)\. .*\?$", TEXTS[DOCS / "which-do-i-need.md"], re.M)
    assert questions == list("12345678")
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", TEXTS[DOCS / "reference/glossary.md"], re.M)
    assert len(terms) >= 20 and terms == sorted(terms, key=str.lower)


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


def test_the_tour_runs_from_top_to_bottom_as_the_package_check_runs_it() -> None:
    source = runpy.run_path(str(ROOT / ".ci/package.py"))["tour"]()
    assert source.startswith("import copy") and "mpinit.float32_weights" in source
    exec(compile(source, "README's tour", "exec"), {"__name__": "__main__"})


def test_a_framework_takes_six_lines() -> None:
    frameworks = [snippet for snippet in EXAMPLES if snippet.page == README and "mpinit.integrations" in snippet.source]
    assert len(frameworks) == 3
    assert all(len(snippet.source.splitlines()) <= 6 for snippet in frameworks)


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


def test_make_has_the_targets_that_readme_and_contributing_name() -> None:
    makefiles = "".join((ROOT / name).read_text("utf-8") for name in ("Makefile", "benchmarks/bench.mk"))
    named = re.findall(r"\bmake ([a-z-]+)", TEXTS[README] + (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert not set(named) - {name for line in re.findall(r"^[\w -]+(?=:)", makefiles, re.M) for name in line.split()}


ROWS = re.findall(r"^\| (`.+?`(?:, `.+?`)*)", TEXTS[DOCS / "reference/messages.md"], re.MULTILINE)
BEGINNINGS = [text for row in ROWS for text in re.findall(r"`(.+?)`", row)]

# What is raised with a text that was made elsewhere, or that names a thing alone as Python's own errors do.
WITHOUT_A_TEXT = {
    "basics/patching.py: _raise_first: note",
    "cli/convert.py: _checked: ValueError",
    "cli/explain.py: load: ValueError",
    "compat/apex/amp/frontend.py: load_state_dict: ValueError",
    "settings/properties.py: build: ValueError",
    "settings/resolve.py: _level_of: ValueError",
    "settings/resolve.py: _read_toml: OSError",
    "settings/resolve.py: read_settings: ValueError",
    "torch_internals/traced_writes.py: _refuse: RuntimeError",  # the text is of break_graph_if_written's caller
}


@functools.cache
def collected() -> list[messages.Message]:
    """The messages of the code, which takes a second."""
    return messages.collect()


def sites() -> set[str]:
    """Modules and functions that raise or warn, and yield no message to the page."""
    found = set()
    for path in sorted(messages.PACKAGE.rglob("*.py")):
        names = messages.names_of(path)
        for scope in messages.functions_of(messages.parsed(path)):
            for kind, argument in messages.raised(scope):
                if not any(map(messages.has_text, messages.texts(argument, names.inside(scope)))):
                    found.add(f"{path.relative_to(messages.PACKAGE).as_posix()}: {scope.name}: {kind}")
    return found


def test_every_error_and_warning_has_a_text_on_the_page() -> None:
    assert sites() == WITHOUT_A_TEXT


def test_every_folder_with_messages_has_a_heading() -> None:
    rooms = {room for names in messages.ROOMS.values() for room in names}
    assert {message.module.split("/")[0] for message in collected()} <= rooms
    assert len(collected()) > 200


def pattern(text: str) -> str:
    """What a row shows, as a search in the messages: its dots and numbers stand for anything."""
    parts = re.split(r"\.\.\.|\b\d+\b|\bAdam\b|\bDistributedDataParallel\b", text)
    return ".*?".join(map(re.escape, parts))


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_explained_messages_exist_in_the_code(beginning: str) -> None:
    assert any(re.search(pattern(beginning), message.text.replace("`", "")) for message in collected())


def test_explained_messages_are_found() -> None:
    assert len(BEGINNINGS) >= 20


def test_generator_reads_its_own_tree(tmp_path: Path) -> None:
    (tmp_path / "mpinit.py").write_text("raise AssertionError('the package of another tree')\n", "utf-8")
    made = "import runpy, sys; print(runpy.run_path(sys.argv[1], run_name='generate')['mpinit'].__file__)"
    paths = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", made, str(ROOT / "docs/generate.py")]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | paths, cwd=tmp_path, check=False)
    assert found.stdout.strip() == str(ROOT / "mpinit/__init__.py"), found.stderr


TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"\b(?:mpinit|tests|configs)/[\w/.]*|\b[A-Z]+\.md\b", TEXT)))


@pytest.mark.parametrize("path", PATHS)
def test_every_folder_and_file_on_the_map_exists(path: str) -> None:
    target = ROOT / path.rstrip(".")
    assert target.is_dir() if path.endswith("/") else target.exists()


def test_every_name_exists() -> None:
    assert {"MasterWeightsMode", "warn_user"} <= set(re.findall(r"`(\w+)`", TEXT))
    assert mpinit.plan.MasterWeightsMode and logs.warn_user and mpinit.plan.ScalingRule


def test_every_folder_is_on_the_map() -> None:
    rooms = {init.parent.name for init in PACKAGE.glob("*/__init__.py")}
    assert not {room for room in rooms if f"mpinit/{room}/" not in TEXT}


def test_contributing_is_one_page_linked_from_the_readme() -> None:
    assert len(TEXT.splitlines()) <= 75
    assert "](CONTRIBUTING.md)" in TEXTS[README]


needs("sklearn")


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "figures.py"))


def test_page_shows_the_counted_exponents(figures: dict[str, Any], tmp_path: Path) -> None:
    page = TEXTS[DOCS / "explanation" / "loss-scaling.md"]
    shown = re.search(r"begin -->\n\n```text\n(.*?)\n```\n\n<!-- figures", page, re.S)
    assert shown is not None
    found = figures["gradients"](steps=2)
    # Numbers differ from one processor's kernels to another's, and with so few steps; what they are of does not.
    assert re.sub(r"[\d.,]+(e\+\d+)?", "N", figures["description_of"](found)) == re.sub(
        r"[\d.,]+(e\+\d+)?", "N", shown[1]
    )
    assert f"{found.numel():,} gradients" in shown[1]
    stamps, committed, picture = figures["stamps"], DOCS / "_static" / "gradients.png", tmp_path / "gradients.png"
    assert stamps.read(committed) == stamps.of_text(shown[1]), "the picture is of another run: make bench-tables"
    figures["draw"](found, picture)
    assert stamps.read(picture) == stamps.of_text(figures["description_of"](found))


def test_the_picture_of_masters_is_as_new_as_its_data(figures: dict[str, Any]) -> None:
    measured = (DOCS / "measured" / "masters.json").read_text(encoding="utf-8")
    stamps = figures["stamps"]
    assert stamps.read(DOCS / "_static" / "masters.png") == stamps.of_text(measured), "run: make bench-tables"


FIGURES = {
    "levels": DOCS / "explanation/levels.md",
    "audited": DOCS / "how-to/see-precision.md",
    "served": DOCS / "explanation/training-and-serving.md",
    "skipping": DOCS / "explanation/loss-scaling.md",
    "worth": DOCS / "explanation/masters.md",
    "worth_in_short": README,
}


@pytest.mark.parametrize("made", FIGURES)
def test_tables_of_what_was_measured_are_those_of_the_files(made: str, figures: dict[str, Any]) -> None:
    assert figures[made]().strip() in TEXTS[FIGURES[made]], "run: python docs/figures.py"


def test_audit_predictions_cover_20_optimizers_at_4_rates() -> None:
    found = json.loads((DOCS / "measured" / "audit.json").read_text(encoding="utf-8"))
    assert len({(row["optimizer"], row["rate"]) for row in found["rows"]}) == 80
    assert found["mean error"] < 0.02
