"""The rules for words hold in mpinit/ and docs/: openings of docstrings, long sentences and banned verbs."""

import ast
import sys
from pathlib import Path

import pytest
from words import (
    OPENINGS,
    ROOT,
    banned_verb_in,
    begins_with_verb,
    docstrings_of,
    findings_below,
    findings_in_markdown,
    findings_in_python,
    opening_of,
    verbs_in,
)

import mpinit

sys.path.insert(0, str(ROOT / "docs"))

from messages import collect

# Names of other libraries that a file has to define as they are.
ALLOWED: frozenset[str] = frozenset()
PACKAGE = ROOT / "mpinit"
# Entries are removed as these are rewritten.
NOT_YET: set[str] = set()
PARTS = sorted(
    path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path.is_dir() and path.name[0] != "_")
)


@pytest.mark.parametrize("name", [name for name in PARTS if name not in NOT_YET])
def test_words_of_the_package(name: str) -> None:
    """Check a folder or file of the package: no finding of any kind."""
    found = [f"{kind}: {finding}" for kind, finding in findings_below([PACKAGE / name], ALLOWED)]
    assert not found, "\n".join(found)


def test_words_of_the_pages() -> None:
    """Check all pages, the list of messages too, and their generators."""
    pages = [path for path in sorted((ROOT / "docs").rglob("*")) if path.suffix in (".md", ".py")]
    found = [
        f"{kind}: {finding}"
        for kind, finding in findings_below([*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ALLOWED)
    ]
    assert not found, "\n".join(found)


def test_words_of_the_benchmarks() -> None:
    found = [f"{kind}: {finding}" for kind, finding in findings_below([ROOT / "benchmarks"], ALLOWED)]
    assert not found, "\n".join(found)


def test_words_of_the_messages() -> None:
    """Check every error, warning and note of the package, apart from what it quotes, for the banned verbs."""
    found = [f"{message.module}: {verbs}: {message.text}" for message in collect() if (verbs := verbs_in(message.text))]
    assert not found, "\n".join(found)


PLANTED = '''"""Whether this module is one."""


class Forgotten:
    def take(self, given):
        """Of a sentence."""
        self.held = told = 1  # What a trailing comment says is not an opening.
        # What a comment of its own opens with is one.
        return "take given"


def f(x):
    """The value of x.

    Args:
        x: {long}
    """
'''


def test_planted_faults_are_found(tmp_path: Path) -> None:
    """Check that the script finds each kind of fault once, in code and on a page."""
    path = tmp_path / "planted.py"
    path.write_text(PLANTED.replace("{long}", " ".join(["word"] * 36) + "."))
    found = sorted((kind, finding.line, finding.text.split()[0]) for kind, finding in findings_in_python(path))
    assert found == [
        ("name", 4, "Forgotten"),
        ("name", 5, "given"),
        ("name", 5, "take"),
        ("name", 7, "held"),
        ("name", 7, "told"),
        ("opening", 1, "module:"),
        ("opening", 6, "take:"),
        ("opening", 8, "comment:"),
        ("opening", 13, "f:"),
        ("sentence", 16, "36"),
    ]
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n- one\n- {'word ' * 36}end.\n\n```python\ntaken = {'1 + ' * 40}1\n```\n")
    assert [(kind, finding.line) for kind, finding in findings_in_markdown(page)] == [("sentence", 4), ("name", 7)]


def test_banned_verbs_are_words_not_letters() -> None:
    names = {"takeoff": "", "leaves": "", "lookup": "", "outcome": "", "take_over": "take", "came_in": "come in"}
    names |= {"comes": "", "InterruptsHeld": "hold", "threshold": "", "standard": "", "essay": "", "_given": "give"}
    assert {name: banned_verb_in(name) for name in names} == names


def test_verbs_in_messages() -> None:
    texts = {"Give it 'take'": ["give"], "it came in 16-bit; hold `given`": ["come in", "hold"], "a notebook": []}
    assert {text: verbs_in(text) for text in texts} == texts


def names_below_the_public_face(tree: ast.AST) -> list[str]:
    """List what a file imports from the package's modules that are not public."""
    public = ("mpinit", "mpinit.amp", "mpinit.integrations", "mpinit.compat")
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mpinit":
            if node.module == "mpinit":
                found += [each.name for each in node.names if each.name not in (*mpinit.__all__, "amp")]
            elif node.module not in public and not (node.module or "").startswith("mpinit.integrations."):
                found.append(str(node.module))
    return found


FILES = sorted((ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_imports_below_the_public_face_have_a_reason(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    text = ast.get_docstring(tree) or ""
    assert ("Below the public face:" in text) == bool(names_below_the_public_face(tree))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_docstrings_of_tests_begin_with_a_verb(path: Path) -> None:
    found = [
        f"{node.name}: {text.strip().splitlines()[0]}"
        for node, _, text in docstrings_of(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if opening_of(text) in OPENINGS or not begins_with_verb(node, text)
    ]
    assert not found, "\n".join(found)
