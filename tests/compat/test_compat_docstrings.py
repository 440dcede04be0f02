"""Docstrings of the compatibility package: their examples run, and every public name has one."""

from __future__ import annotations

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpinit
from mpinit.compat import uninstall_apex

PACKAGE = Path(mpinit.__file__).parent
PATHS = [path for path in sorted((PACKAGE / "compat").rglob("*.py")) if "bootstrap" not in path.parts]


@pytest.fixture(autouse=True)
def _not_installed_afterwards() -> Iterator[None]:
    yield
    uninstall_apex()


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_examples_run(path: Path) -> None:
    module = importlib.import_module(name_of(path))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in doctest.DocTestFinder().find(module, module.__name__):
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_public_names_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            setter = any(isinstance(decorator, ast.Attribute) for decorator in node.decorator_list)
            if not node.name.startswith("_") and not setter:
                assert ast.get_docstring(node) or node.name in PROTOCOL, node.name


# Methods that a base class documents.
PROTOCOL = {"create_module", "exec_module", "forward", "backward", "evaluate", "revert", "finish"}
