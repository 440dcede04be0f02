"""The rules of the house that no linter knows, and its size."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

from frameworks import let_torchvision_load

import mpinit

# Every module is imported here, Lightning's plug too.
let_torchvision_load()

PACKAGE = Path(mpinit.__file__).parent
ROOT = Path(__file__).parents[2]
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
# Lines that there may be; lowered as they go.
MOST_LINES = {"mpinit": 22_600, "tests": 29_468}
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


def test_the_house_stays_small() -> None:
    lines = {
        folder: sum(len(path.read_text("utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py"))
        for folder in MOST_LINES
    }
    assert all(lines[folder] <= most for folder, most in MOST_LINES.items()), lines


def test_no_constructor_has_more_than_5_arguments() -> None:
    """But dataclasses, which are records, and ``compat/``, whose signatures are apex's."""
    found = set()
    for cls in classes():
        if "__init__" in vars(cls) and inspect.isfunction(cls.__init__) and not dataclasses.is_dataclass(cls):
            arguments = list(inspect.signature(cls.__init__).parameters)[1:]
            if len(arguments) > 5 and not cls.__module__.startswith("mpinit.compat."):
                found.add(f"{cls.__module__}.{cls.__qualname__}")
    assert not found


def test_no_interface_has_a_single_implementer() -> None:
    known = list(classes())
    found = set()
    for interface in known:
        if getattr(interface, "_is_protocol", False):
            members = {name for name in vars(interface) if not name.startswith("_")} or {"__call__"}
            members |= set(vars(interface).get("__annotations__", {}))
            others = [cls for cls in known if cls is not interface and all(hasattr(cls, name) for name in members)]
        elif inspect.isabstract(interface):
            others = [cls for cls in known if issubclass(cls, interface) and not inspect.isabstract(cls)]
        else:
            continue
        if len(others) == 1:
            found.add(f"{interface.__module__}.{interface.__qualname__}")
    assert not found


def test_nothing_asks_the_collector_reference_counts_frames_or_bytecode() -> None:
    inside = re.compile(r"\bgc\.|\bgetrefcount\b|\b_getframe\b|\bcurrentframe\b|\bimport dis\b|\bco_code\b")
    rooms = ("torch_internals/", "basics/")
    found = {name for name, text in SOURCES.items() if not name.startswith(rooms) and inside.search(code_of(text))}
    assert not found


def test_only_torch_internals_tells_devices_apart() -> None:
    apart = re.compile(r"device\.type\s*(?:[!=]=|in\b|not in\b)\s*[\"'({\[]")
    found = {name for name, text in SOURCES.items() if not name.startswith("torch_internals/") and apart.search(text)}
    assert not found


def code_of(text: str) -> str:
    """A file without its comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return ast.unparse(tree)


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
