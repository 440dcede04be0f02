"""Docstrings: their examples run, and every public name has one."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from frameworks import let_torchvision_load

import mpinit
from mpinit.compat import uninstall_apex

# Every module is imported here, Lightning's plug too.
let_torchvision_load()

# Methods that a base class documents.
PROTOCOL = {"create_module", "exec_module", "forward", "backward", "evaluate", "revert", "finish"}
PACKAGE = Path(__file__).parents[2] / "mpinit"


def public_modules() -> list[str]:
    """Every module but those that are run rather than imported."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if "bootstrap" not in parts and parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


@pytest.fixture
def without_apex() -> Iterator[None]:
    """What an example has installed as apex goes with it."""
    yield
    uninstall_apex()


@pytest.mark.parametrize("name", public_modules())
@pytest.mark.usefixtures("without_apex")
def test_the_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in doctest.DocTestFinder().find(module, name):
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("name", public_modules())
def test_public_functions_and_classes_are_documented(name: str) -> None:
    path = PACKAGE.parent.joinpath(*name.split("."))
    path = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{name} does not say what it is for"
    # Of the classes that users of apex know, the methods too.
    nodes = ast.walk(tree) if "compat" in name else tree.body
    bare = [
        node.name
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and node.name not in PROTOCOL
        and not any(isinstance(d, ast.Attribute) or ast.unparse(d) == "overload" for d in node.decorator_list)
        and not ast.get_docstring(node)
    ]
    assert not bare


def test_the_search_runs_examples_at_all() -> None:
    found = doctest.DocTestFinder().find(importlib.import_module("mpinit.basics.dtypes"))
    assert any("parse_dtype" in test.name and test.examples for test in found)


PUBLIC = sorted({name for name in mpinit.__all__ if callable(getattr(mpinit, name))} - {"Properties"})


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_what_goes_in_and_what_comes_out(name: str) -> None:
    thing = getattr(mpinit, name)
    text = inspect.getdoc(thing) or ""
    signature = inspect.signature(thing)
    args = text.partition("Args:")[2].partition("\n\n")[0]
    named = {word for line in re.findall(r"^ {4}([\w*, ]+):", args, re.M) for word in re.findall(r"\w+", line)}
    assert set(signature.parameters) - named == set()
    gives = inspect.isfunction(thing) and signature.return_annotation not in ("None", None)
    assert not gives or "Returns:" in text or "Yields:" in text
    assert ">>> " in text.partition("Example:")[2]
    # The site takes what stands before a colon for a type.
    first = re.search(r"(?:Returns|Yields):\n +(.*)", text)
    assert first is None or ": " not in re.sub(r":?\w*:?`+.*?`+", "", first[1])
