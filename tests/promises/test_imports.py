"""The architecture, proved from the source: imports point to lower layers only, never in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mpinit"

# The rows of the house, from the ground up; a folder's name stands for everything in it. A file imports from its own
# folder and from rows below.
ROWS: tuple[tuple[str, ...], ...] = (
    ("basics",),
    ("torch_internals",),
    ("settings",),
    ("plan",),
    ("distributed",),
    ("masters",),
    ("scaling", "model", "functions"),
    ("optimizer",),
    ("session",),
    ("registry",),
    ("checks_of_ranks", "checks_of_states"),
    ("checks",),
    ("inspect", "checkpoint", "in_float32", "weight_changes"),
    ("initialization", "grad_scaler", "train_state", "progress"),
    ("amp",),
    ("", "__main__", "cli", "compat", "integrations"),
)


def modules() -> dict[str, Path]:
    """Dotted name below the package ("" for the package itself) -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def row_of(name: str) -> int:
    folder = name.partition(".")[0]
    for number, names in enumerate(ROWS):
        if folder in names:
            return number
    raise AssertionError(f"mpinit/{name.replace('.', '/')} is in no row: give its folder one in this file")


def imported(name: str) -> Iterator[str]:
    """The package's own modules that ``name`` imports, anywhere in its source."""
    path = MODULES[name]
    own_package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    own_package = [part for part in own_package if part]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "mpinit":
                    yield nearest(alias.name.split(".")[1:])
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = own_package[: len(own_package) - node.level + 1]
            elif (node.module or "").split(".")[0] == "mpinit":
                base = []
            else:
                continue
            module = (node.module or "").split(".") if node.module else []
            base = base + (module if node.level else module[1:])
            for alias in node.names:
                yield nearest([*base, alias.name])


def nearest(parts: list[str]) -> str:
    """The longest leading part that is a module: what follows is a name inside it."""
    while parts and ".".join(parts) not in MODULES:
        parts = parts[:-1]
    return ".".join(parts)


EDGES = {name: {target for target in imported(name) if target != name} for name in MODULES}


def test_the_walk_sees_the_imports_it_should() -> None:
    assert {"settings.properties", "basics.dtypes", "plan", ""} <= set(MODULES)
    assert "settings.properties" in EDGES["settings.opt_levels"]
    assert EDGES["basics.dtypes"] == set()
    assert "torch_internals.native_autocast" in EDGES["functions.casters"]


@pytest.mark.parametrize("name", MODULES)
def test_imports_stay_in_the_folder_or_point_to_rows_below(name: str) -> None:
    folder = name.partition(".")[0]
    elsewhere = {target for target in EDGES[name] if target.partition(".")[0] != folder}
    if name in ("", "__main__", "cli.run"):
        elsewhere -= {"cli", "compat", "compat.running"}  # the faces are one row with compat
    upward = {target for target in elsewhere if row_of(target) >= row_of(name)}
    assert not upward, f"mpinit.{name} imports {upward} from its own row or above"


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in finished:
            return []
        for target in sorted(edges[name]):
            found = visit(target, [*path, name])
            if found:
                return found
        finished.add(name)
        return []

    for name in sorted(edges):
        cycle = visit(name, [])
        if cycle:
            return cycle
    return []


def test_there_is_no_circle() -> None:
    assert find_cycle(EDGES) == []
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"], "where there is one, it is found"


CORE = [name for name in MODULES if name.split(".")[0] not in ROWS[-1]]


@pytest.mark.parametrize("name", CORE)
def test_the_core_needs_only_torch_pydantic_and_the_standard_library(name: str) -> None:
    roots = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            roots.add((node.module or "").split(".")[0])
    assert roots <= set(sys.stdlib_module_names) | {"torch", "pydantic", "mpinit"}


@pytest.mark.parametrize("name", CORE)
def test_the_core_does_not_know_the_compatibility_package(name: str) -> None:
    assert not [target for target in EDGES[name] if target.split(".")[0] == "compat"]


@pytest.mark.parametrize("name", CORE)
def test_the_core_logs_and_never_prints(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert "print" not in calls


# -- what importing takes ---------------------------------------------------------------------------------------------


def test_the_import_leaves_pydantic_and_inspectors_until_they_are_asked_for() -> None:
    program = """
import sys, mpinit
from mpinit import amp
late = [name for name in sys.modules if name.split(".")[0] in ("pydantic", "pydantic_core")]
assert not late, late
inspectors = [f"mpinit.inspect.{name}" for name in ("suggest", "explain", "history", "exponents", "stalled")]
assert not any(name in sys.modules for name in inspectors)
assert {"History", "Properties", "initialize"} <= set(dir(mpinit))
assert mpinit.OPT_LEVELS["O2"] == amp.OPT_LEVELS["O2"] and mpinit.Properties is amp.Properties
assert mpinit.suggest.__module__ == "mpinit.inspect.suggest"
star = {}
exec("from mpinit import *", star)
assert set(mpinit.__all__) <= set(star)
try:
    mpinit.initialise
except AttributeError as error:
    assert "has no attribute 'initialise'" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
