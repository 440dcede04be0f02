"""Structure of the package: layers of imports, cycles, constructors, interfaces.

Below the public face: the package's own structure is tested.
"""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from frameworks import framework_of, let_torchvision_load

import mpinit

# Every module is imported here, Lightning's plug too.
let_torchvision_load()

PACKAGE = Path(mpinit.__file__).parent
ROOT = Path(__file__).parents[2]
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
# Stand-ins for apex's modules are packages that only importing scripts load; scripts to run end the process.
NOT_IMPORTED = ("mpinit.__main__",)


def classes() -> Iterator[type]:
    for info in pkgutil.walk_packages(mpinit.__path__, "mpinit."):
        framework = framework_of(info.name)
        if info.name in NOT_IMPORTED or (framework is not None and find_spec(framework) is None):
            continue
        module = importlib.import_module(info.name)
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == info.name:
                yield cls


def test_no_constructor_has_more_than_5_arguments() -> None:
    """Check all classes but dataclasses, and those in ``compat/``, whose signatures are apex's."""
    found = set()
    for cls in classes():
        if "__init__" in vars(cls) and inspect.isfunction(cls.__init__) and not dataclasses.is_dataclass(cls):
            arguments = list(inspect.signature(cls.__init__).parameters)[1:]
            if len(arguments) > 5 and not cls.__module__.startswith("mpinit.compat."):
                found.add(f"{cls.__module__}.{cls.__qualname__}")
    assert not found


def test_no_class_has_more_than_20_methods() -> None:
    """Count inherited ones, too. What a base class of another package dictates is not counted."""
    found = {}
    for cls in classes():
        dictated = {name for base in cls.__mro__ if not base.__module__.startswith("mpinit") for name in vars(base)}
        own = {name for base in cls.__mro__ for name, value in vars(base).items() if is_method(value)}
        if len(own - dictated) > 20:
            found[f"{cls.__module__}.{cls.__qualname__}"] = len(own - dictated)
    assert not found


def is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, (staticmethod, classmethod, property))


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


def test_only_internals_use_the_collector_frames_or_bytecode() -> None:
    inside = re.compile(r"\bgc\.|\bgetrefcount\b|\b_getframe\b|\bcurrentframe\b|\bimport dis\b|\bco_code\b")
    allowed = ("torch_internals/", "basics/")
    found = {name for name, text in SOURCES.items() if not name.startswith(allowed) and inside.search(code_of(text))}
    assert not found


def test_only_torch_internals_and_basics_compare_device_types() -> None:
    apart = re.compile(r"device\.type\s*(?:[!=]=|in\b|not in\b)\s*[\"'({\[]")
    found = {
        name
        for name, text in SOURCES.items()
        if not name.startswith(("torch_internals/", "basics/")) and apart.search(text)
    }
    assert not found


def code_of(text: str) -> str:
    """Return a file's code without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return ast.unparse(tree)


def test_no_method_overrides_a_concrete_method() -> None:
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
    """Return whether the class body defines ``name``: torch also sets a wrapped ``step`` on each optimizer's class."""
    member = vars(cls).get(name)
    written = getattr(getattr(member, "fget", member), "__qualname__", None)
    return bool(written == f"{cls.__qualname__}.{name}")


# The layers, lowest first; the name of a folder includes its files. A file imports from its own folder and from rows
# that are lower.
ROWS: tuple[tuple[str, ...], ...] = (
    ("basics",),
    ("torch_internals",),
    ("config",),
    ("autocast",),
    ("distributed",),
    ("masters",),
    ("scaling", "model"),
    ("optimizer",),
    ("session_view",),
    ("session",),
    ("registry",),
    ("checks",),
    ("checkpoint", "in_float32", "pretrained"),
    ("initialization", "grad_scaler", "train_state"),
    ("amp",),
    ("inspect",),
    ("", "__main__", "cli", "compat", "integrations"),
)


def modules() -> dict[str, Path]:
    """Map dotted names below the package ("" is the package itself) to files."""
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
    raise AssertionError(f"mpinit/{name.replace('.', '/')} is in no row: add its folder to ROWS")


def imported(name: str) -> Iterator[str]:
    """Yield the package's own modules that ``name`` imports, anywhere in its source."""
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
    """Return the longest leading part that is a module; the remaining parts are names inside it."""
    while parts and ".".join(parts) not in MODULES:
        parts = parts[:-1]
    return ".".join(parts)


EDGES = {name: {target for target in imported(name) if target != name} for name in MODULES}


def test_edges_include_known_imports() -> None:
    assert {"config.properties", "basics.dtypes", ""} <= set(MODULES)
    assert "config.properties" in EDGES["config.reading"]
    assert EDGES["basics.dtypes"] == set()
    assert "autocast.thread_flags" in EDGES["autocast.casters"]


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_only_its_folder_and_rows_below(name: str) -> None:
    folder = name.partition(".")[0]
    elsewhere = {target for target in EDGES[name] if target.partition(".")[0] != folder}
    if name in ("", "__main__", "cli.run"):
        elsewhere -= {"cli", "compat", "compat.importing"}  # they are in the same row
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


def test_imports_have_no_cycle() -> None:
    assert find_cycle(EDGES) == []
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"], "find_cycle finds a cycle"


CORE = [name for name in MODULES if name.split(".")[0] not in ROWS[-1]]


@pytest.mark.parametrize("name", CORE)
def test_core_imports_only_torch_pydantic_and_standard_library(name: str) -> None:
    roots = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            roots.add((node.module or "").split(".")[0])
    assert roots <= set(sys.stdlib_module_names) | {"torch", "pydantic", "mpinit"}


@pytest.mark.parametrize("name", CORE)
def test_core_does_not_import_compat(name: str) -> None:
    assert not [target for target in EDGES[name] if target.split(".")[0] == "compat"]


# What reports, commands, frameworks and apex's face may use of a session; compat/_core.py shares scalers by more.
OF_SESSION = {
    *("opt_level", "properties", "models", "optimizers", "scalers", "describe", "view"),
    *("patch", "when_undone", "skips_step"),
}


@pytest.mark.parametrize("folder", ["inspect", "cli", "compat", "integrations"])
def test_sessions_are_read_by_one_interface(folder: str) -> None:
    for name, source in SOURCES.items():
        if name.startswith(f"{folder}/") and name != "compat/_core.py":
            assert set(re.findall(r"\bsession\.(\w+)", source)) <= OF_SESSION, name


@pytest.mark.parametrize("name", CORE)
def test_core_never_calls_print(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert "print" not in calls
