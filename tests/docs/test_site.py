"""The site: its snippets run, its made pages are up to date, every public name and twenty questions have a place."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import let_torchvision_load, names_for
from snippets import ROOT, Snippet, blocks, snippets

import mpinit

let_torchvision_load()
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Its blocks have a test of their own: tests/compat/test_migration_page.py.
OTHERS = ("migrate.md",)
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
    "unfreeze later": ("how-to/model.md", "Add or unfreeze parameters later"),
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
def test_a_snippet_runs(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    PRELUDE.run(namespace)
    namespace |= names_for(snippet.mark, tmp_path)
    snippet.run(namespace)


def generator() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


@pytest.mark.parametrize("name", ["reference/api.md", "reference/properties.md", "reference/cli.md"])
def test_a_made_page_is_what_the_code_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # argparse wraps to the terminal
    made = generator()["MADE"][name]()
    assert (DOCS / name).read_text(encoding="utf-8") == made, "run: python docs/generate.py"


def test_every_public_name_is_on_the_reference_page() -> None:
    listed = {name for names in generator()["GROUPS"].values() for name in names}
    public = set(mpinit.__all__) - {"__version__", "amp", "OPT_LEVELS"}
    assert not public - listed


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_to_files_and_every_page_is_reached(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    front = DOCS / "index.md"
    assert page == front or page in links(front)
