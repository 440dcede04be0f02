"""The site: its snippets run, its made pages are up to date, every public name and twenty questions have a place."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import let_torchvision_load, names_for
from snippets import PRINTS, ROOT, Snippet, blocks, same_but_for_numbers, snippets

import mpinit
from mpinit import cli

let_torchvision_load()
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Its blocks have a test of their own: tests/compat/test_migration_page.py.
OTHERS = ("migrate.md",)
MADE = runpy.run_path(str(DOCS / "generate.py"))["MADE"]
ALL = [snippet for page in PAGES if page.name not in OTHERS for snippet in snippets(page)]
PRELUDE = next(snippet for snippet in ALL if snippet.mark == "prelude")
EXAMPLES = [snippet for snippet in ALL if snippet is not PRELUDE]

# What people come with, and the page and heading that has it; all are linked from the front page, or one page further.
QUESTIONS = {
    "resume at another level": ("how-to/checkpoints.md", "Save and resume"),
    "why was my step skipped": ("tutorial/find-an-overflow.md", "What was skipped, and why"),
    "LayerNorm in float32": ("how-to/model.md", "Leave parts in float32"),
    "clip gradients": ("how-to/training-loop.md", "Clip gradients"),
    "accumulate gradients": ("how-to/training-loop.md", "Accumulate gradients"),
    "two losses": ("how-to/training-loop.md", "Several losses"),
    "a GAN": ("how-to/training-loop.md", "Several models and optimizers: a GAN"),
    "LBFGS": ("how-to/training-loop.md", "Closures: LBFGS"),
    "a gradient penalty": ("how-to/training-loop.md", "Gradient penalties"),
    "learning-rate scheduler after a skip": ("how-to/training-loop.md", "Learning-rate schedulers"),
    "average of weights": ("how-to/checkpoints.md", "Change weights by hand: EMA, surgery, pruning"),
    "targets are rounded": ("how-to/model.md", "Targets, and methods other than forward"),
    "bytes a parameter": ("how-to/memory.md", "The least memory: split masters"),
    "DistributedDataParallel": ("how-to/distributed.md", "Distributed data parallel"),
    "fully_shard": ("how-to/distributed.md", "FSDP2"),
    "save from several processes": ("how-to/distributed.md", "Save and resume"),
    "from apex": ("how-to/migrate.md", "From apex.amp"),
    "from GradScaler": ("how-to/migrate.md", "From torch.amp"),
    "Trainer of Transformers": ("how-to/frameworks.md", "Transformers: Trainer"),
    "bfloat16 checkpoint": ("how-to/sixteen-bit-checkpoint.md", "I have a 16-bit checkpoint"),
    "what a property does": ("reference/properties.md", "All properties"),
    "which function runs in which type": ("reference/cast-policy.md", "The cast policy"),
    "the loss scale's rules": ("explanation/loss-scaling.md", "Loss scaling"),
    # As somebody types them who has looked for the reason all day.
    "NaN loss at O2": ("tutorial/find-an-overflow.md", "Is it precision at all?"),
    "gradients are inf": ("tutorial/find-an-overflow.md", "What was skipped, and why"),
    "which layer overflows": ("tutorial/find-an-overflow.md", "Which module began it"),
    "loss scale keeps falling": ("tutorial/find-an-overflow.md", "What to change"),
    "loss does not go down in bf16": ("how-to/diagnose.md", "Diagnose"),
    "my EMA": ("how-to/checkpoints.md", "Change weights by hand: EMA, surgery, pruning"),
    "torch.compile": ("how-to/compile.md", "torch.compile"),
    "8-bit optimizer": ("explanation/optimizer-states.md", "Optimizer states in fewer bytes"),
    "DDP wrong order": ("how-to/distributed.md", "Distributed data parallel"),
    "freeze layers": ("how-to/model.md", "Freeze, and unfreeze later"),
    "out of memory": ("how-to/memory.md", "Less memory"),
    "what does this error mean": ("reference/all-messages.md", "All messages"),
    "slower than float32": ("reference/limits.md", "Limits"),
    "fp16 or bf16, which level": ("explanation/levels.md", "Levels in numbers"),
    "does it change my results": ("explanation/levels.md", "Does it change my results?"),
    "train on a CPU": ("explanation/levels.md", "Which one?"),
    "which optimizer works with split": ("how-to/memory.md", "The least memory: split masters"),
    "bf16=True of a framework": ("how-to/migrate.md", "From a framework's precision flag"),
    "back to float32": ("tutorial/from-float32-to-o2.md", "And back"),
    "gradients are None after backward": ("explanation/gradient-release.md", "Stepping inside of backward"),
}


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
    assert len(ALL) == sum(blocks(page) for page in PAGES if page.name not in OTHERS) > 30


# Lightning's data loading asks torch's pytree so, and would like processes of its own.
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("snippet", EXAMPLES, ids=str)
def test_a_snippet_runs_and_prints_what_the_page_shows(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    PRELUDE.run(namespace)
    namespace |= names_for(snippet.mark, tmp_path)
    for earlier in gone_before(snippet):
        earlier.run(namespace)
    capsys.readouterr()
    snippet.run(namespace)
    printed = capsys.readouterr().out
    assert snippet.printed is None or same_but_for_numbers(printed, snippet.printed), printed


def test_what_is_shown_belongs_to_a_snippet() -> None:
    marks = sum(page.read_text(encoding="utf-8").count(PRINTS) for page in PAGES)
    assert marks == sum(snippet.printed is not None for snippet in ALL) >= 3


def gone_before(snippet: Snippet) -> list[Snippet]:
    """What a reader has typed before a snippet that is marked as going on: those since the last that starts afresh."""
    found: list[Snippet] = []
    for earlier in EXAMPLES[: EXAMPLES.index(snippet) + 1]:
        found = [*found, earlier] if earlier.mark == "goes on" else [earlier]
    return found[:-1]


def test_a_tutorial_can_be_typed_from_top_to_bottom() -> None:
    tutorial = [snippet for snippet in EXAMPLES if snippet.page.stem == "from-float32-to-o2"]
    assert gone_before(tutorial[-1]) == tutorial[:-1] and len(tutorial) == 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_code_fits_a_window(page: Path) -> None:
    code = re.findall(r"^```(?:python|bash)$(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    assert not [line for block in code for line in block.splitlines() if len(line) > 100]


def generator() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


@pytest.mark.parametrize("name", sorted(MADE))
def test_a_made_page_is_what_the_code_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # argparse wraps to the terminal
    made = MADE[name]()
    assert (DOCS / name).read_text(encoding="utf-8") == made, "run: python docs/generate.py"


def test_every_public_name_is_on_the_reference_page() -> None:
    listed = {name for names in generator()["GROUPS"].values() for name in names}
    public = set(mpinit.__all__) - {"__version__", "amp", "OPT_LEVELS"}
    assert not public - listed
    plugs = {path.stem for path in (ROOT / "mpinit" / "integrations").glob("*.py")} - {"__init__"}
    assert not plugs - {name.split(".")[1] for name in listed if name.startswith("integrations.")}


def links(page: Path) -> set[Path]:
    """The pages that a page links to, in its text or in its table of contents."""
    text = page.read_text(encoding="utf-8")
    named: list[str] = re.findall(r"\]\(([^)#\s]+\.md)", text)
    for block in re.findall(r"```\{toctree\}(.*?)```", text, re.S):
        named += [f"{line}.md" for line in block.split("\n") if line and not line.startswith(":")]
    return {(page.parent / target).resolve() for target in named}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_two_clicks_from_the_front_page(question: str) -> None:
    name, heading = QUESTIONS[question]
    first = links(DOCS / "index.md")
    assert DOCS / name in first or any(DOCS / name in links(page) for page in first)
    text = (DOCS / name).read_text(encoding="utf-8")
    assert re.search(rf"^#+ {re.escape(heading)}$", text, re.M)


# Words that a search has to know, and the page that is among those it then offers: the site's search looks for pages
# that hold all the words, by their stems.
SEARCHED = {
    "nan loss O2": "tutorial/find-an-overflow.md",
    "step skipped": "tutorial/find-an-overflow.md",
    "gradients inf": "tutorial/find-an-overflow.md",
    "resume another level": "how-to/checkpoints.md",
    "EMA": "how-to/checkpoints.md",
    "torch.compile": "how-to/compile.md",
    "8-bit optimizer": "explanation/optimizer-states.md",
    "DDP order": "how-to/distributed.md",
    "freeze layers": "how-to/model.md",
    "out of memory": "how-to/memory.md",
    "LayerNorm float32": "how-to/model.md",
    "clip gradients": "how-to/training-loop.md",
    "gradient accumulation": "how-to/training-loop.md",
    "slower than float32": "reference/limits.md",
    "undo": "how-to/training-loop.md",
    "change results": "explanation/levels.md",
    "CPU level": "explanation/levels.md",
    "GAN": "how-to/training-loop.md",
    "apex import": "how-to/migrate.md",
    "precision flag": "how-to/migrate.md",
    "optimizer split": "how-to/memory.md",
    "transformers Trainer": "how-to/frameworks.md",
}


@pytest.mark.parametrize("words", SEARCHED)
def test_a_page_has_the_words_that_people_search_for(words: str) -> None:
    text = (DOCS / SEARCHED[words]).read_text(encoding="utf-8").lower()
    assert not [word for word in words.lower().split() if not re.search(rf"\b{re.escape(word)}", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_to_files_and_every_page_is_reached(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    front = DOCS / "index.md"
    assert page == front or page in links(front)


def test_names_in_tables_break_between_their_words_only() -> None:
    nodes = pytest.importorskip("docutils.nodes")
    cell = nodes.entry("", nodes.literal("", "mpinit.stalled(optimizer, n_steps=3)"), nodes.literal("", ".plot()"))
    runpy.run_path(str(DOCS / "conf.py"))["_let_long_names_break"](None, nodes.table("", cell), "page")
    pieces = [[str(part) for part in literal.findall(nodes.Text)] for literal in cell.findall(nodes.literal)]
    shown = [[piece for piece in found if piece != "<wbr>"] for found in pieces]
    assert shown == [["mpinit.", "stalled(", "optimizer, n_", "steps=3)"], [".plot()"]]


# A command at the beginning of a line of a block, or behind torchrun's -m.
COMMANDS = [
    command
    for page in PAGES
    if page.stem != "cli"
    for block in re.findall(r"^```(?:bash|text)$(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    for command in re.findall(r"^(?:torchrun .* -m )?mpinit (.+)", block, re.M)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_that_a_page_gives_it(command: str) -> None:
    own, _ = cli._split(shlex.split(command, comments=True))
    assert cli._parser().parse_args(own).command == own[0]


def test_commands_are_found() -> None:
    assert {command.split()[0] for command in COMMANDS} == set(cli.COMMANDS)
