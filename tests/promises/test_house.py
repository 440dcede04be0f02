"""The sizes of the house, and that what implements an interface is final."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from frameworks import let_torchvision_load

import mpinit

# Every module is imported here, Lightning's and timm's plugs too.
let_torchvision_load()

SOURCES = sorted(Path(mpinit.__file__).parent.rglob("*.py"))
ROOT = Path(__file__).parents[2]
BESIDE_THE_PACKAGE = ("tests", "benchmarks", "examples", ".ci")
LINES_OF_A_FILE = 350
# Stand-ins for apex's modules are packages that only importing scripts load; scripts to run end the process.
NOT_IMPORTED = ("mpinit.__main__",)


def classes() -> Iterator[type]:
    for info in pkgutil.walk_packages(mpinit.__path__, "mpinit."):
        if info.name in NOT_IMPORTED:
            continue
        module = importlib.import_module(info.name)
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == info.name:
                yield cls


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.name))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES_OF_A_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            # The signature and the docstring are what a reader of the function's page sees, not work.
            statements = node.body[1:] if ast.get_docstring(node) else node.body
            length = node.end_lineno - statements[0].lineno + 1 if statements else 0
            assert length <= 40, f"{node.name} has {length} lines"


def test_files_beside_the_package_stay_small() -> None:
    lengths = {}
    for folder in BESIDE_THE_PACKAGE:
        found = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
        assert found, f"{folder} has no files"
        lengths |= found
    assert not {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > LINES_OF_A_FILE}


def test_no_class_has_more_than_15_public_methods() -> None:
    large = {}
    for cls in classes():
        methods = [n for n, m in vars(cls).items() if not n.startswith("_") and inspect.isroutine(m)]
        if len(methods) > 15:
            large[cls.__qualname__] = methods
    assert not large


def test_no_method_overrides_a_concrete_one() -> None:
    found = []
    for cls in classes():
        for base in cls.__mro__[1:]:
            if not base.__module__.startswith("mpinit."):
                continue
            for name, method in vars(base).items():
                concrete = _is_written_in(base, name) and not getattr(method, "__isabstractmethod__", False)
                if concrete and _is_written_in(cls, name) and not name.startswith("__"):
                    found.append(f"{cls.__qualname__}.{name} overrides {base.__qualname__}'s")
    assert not found


def _is_written_in(cls: type, name: str) -> bool:
    """Torch sets an inherited ``step`` in its wrapper on the class of each optimizer that is made."""
    member = vars(cls).get(name)
    written = getattr(getattr(member, "fget", member), "__qualname__", None)
    return bool(written == f"{cls.__qualname__}.{name}")
