"""Structure of the package: sizes of classes, layers of imports, numbers of files and calls.

Below the public face: the package's own structure is tested.
"""

import ast
import dataclasses
import functools
import gc
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from frameworks import framework_of, let_torchvision_load
from torch import nn

import mpinit
from mpinit.basics.modules import ModelIndex
from mpinit.basics.patching import undo_dropped

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


# Classes of more than 20 methods: entries are removed as these are split.
TOO_LARGE: set[str] = set()


def test_no_class_of_the_core_has_more_than_20_methods() -> None:
    """Count methods; a property and its setter are one."""
    faces = tuple(f"mpinit.{name}." for name in ("cli", "compat", "integrations"))
    found = set()
    for cls in classes():
        written = [
            name
            for name, member in vars(cls).items()
            if isinstance(member, (property, functools.cached_property, classmethod, staticmethod))
            or (inspect.isfunction(member) and member.__code__.co_filename == inspect.getsourcefile(cls))
        ]
        if len(written) > 20 and not cls.__module__.startswith(faces):
            found.add(f"{cls.__module__}.{cls.__qualname__}")
    assert found == TOO_LARGE


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


def test_only_torch_internals_and_basics_use_gc_frames_or_bytecode() -> None:
    inside = re.compile(r"\bgc\.|\bgetrefcount\b|\b_getframe\b|\bcurrentframe\b|\bimport dis\b|\bco_code\b")
    allowed = ("torch_internals/", "basics/")
    found = {name for name, text in SOURCES.items() if not name.startswith(allowed) and inside.search(code_of(text))}
    assert not found


def test_only_torch_internals_compares_device_types() -> None:
    apart = re.compile(r"device\.type\s*(?:[!=]=|in\b|not in\b)\s*[\"'({\[]")
    found = {name for name, text in SOURCES.items() if not name.startswith("torch_internals/") and apart.search(text)}
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
    ("settings",),
    ("plan",),
    ("distributed",),
    ("masters",),
    ("scaling", "model", "functions"),
    ("optimizer",),
    ("session",),
    ("registry",),
    ("checks",),
    ("inspect", "checkpoint", "in_float32"),
    ("initialization", "grad_scaler", "train_state"),
    ("amp",),
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
    assert {"settings.properties", "basics.dtypes", "plan", ""} <= set(MODULES)
    assert "settings.properties" in EDGES["settings.resolve"]
    assert EDGES["basics.dtypes"] == set()
    assert "torch_internals.native_autocast" in EDGES["functions.casters"]


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_only_its_folder_and_rows_below(name: str) -> None:
    folder = name.partition(".")[0]
    elsewhere = {target for target in EDGES[name] if target.partition(".")[0] != folder}
    if name in ("", "__main__", "cli.run"):
        elsewhere -= {"cli", "compat", "compat.running"}  # they are in the same row
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
def test_core_imports_only_torch_pydantic_and_the_standard_library(name: str) -> None:
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


@pytest.mark.parametrize("name", CORE)
def test_core_never_calls_print(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert "print" not in calls


def files_entered(function: Callable[[], Any]) -> set[str]:
    """Return the files of the library in which a call runs functions."""
    return set(calls_made(function))


def calls_made(function: Callable[[], Any]) -> list[str]:
    """Return for each call of a function of the library the file that it is in."""
    found = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            found.append(frame.f_code.co_filename.removeprefix(str(PACKAGE)))

    gc.collect()
    undo_dropped()  # sessions of other tests
    gc.disable()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def blocks(count: int) -> nn.Module:
    """Make ``count`` blocks of a layer, its norm and its activation."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(count)))


@pytest.mark.parametrize(("level", "set_up", "iteration"), [("O0", 23, 8), ("O2", 38, 23), ("O5", 38, 23)])
def test_initialize_iteration_and_forward_run_code_of_few_files(level: str, set_up: int, iteration: int) -> None:
    model = blocks(6)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(4, 8)

    def train() -> None:
        with mpinit.scale_loss(model(inputs).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    # The first initialize of a process runs code that later ones do not.
    mpinit.undo(mpinit.initialize(nn.Linear(2, 2), opt_level=level))
    found = files_entered(lambda: mpinit.initialize(model, optimizer, opt_level=level))
    assert len(found) <= set_up, sorted(found)
    for _ in range(3):
        train()
    found = files_entered(train)
    assert len(found) <= iteration, sorted(found)
    assert len(files_entered(lambda: model(inputs))) <= 8
    mpinit.undo(model)


def twelve_layers() -> nn.Module:
    """Make 12 times a layer, its norm and its activation: 36 modules and 48 weights."""
    return nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())))


def walks_over(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every call from now on that iterates over the modules or tensors of ``model``."""
    walks: list[str] = []

    def record(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if any(arg is model for arg in args):
                walks.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)

    for name in ("modules", "named_modules", "parameters", "named_parameters", "buffers", "named_buffers", "children"):
        record(nn.Module, name)
    record(ModelIndex, "_walk")
    for name in list(sys.modules):
        if name.startswith("mpinit.") and hasattr(sys.modules[name], "modules_of"):
            record(sys.modules[name], "modules_of")
    return walks


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("keywords", [{}, {"keep_fp32": ["3", "*.bias"]}, {"master_weights": "model"}], ids=str)
def test_initialize_walks_over_a_model_at_most_three_times(
    level: str, keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if level in ("O0", "O1") and "master_weights" in keywords:
        pytest.skip("the weights are float32")
    model = twelve_layers()
    model.register_buffer("table", torch.randn(8))
    optimizer = torch.optim.AdamW(model.parameters())
    walks = walks_over(model, monkeypatch)
    mpinit.initialize(model, optimizer, opt_level=level, **keywords)  # type: ignore[arg-type]
    assert 1 <= len(walks) <= 3, walks
    monkeypatch.undo()
    mpinit.undo(model)


@pytest.mark.parametrize("opt_level", ["O2", "O5"])
def test_calls_of_a_float32_weights_block_do_not_grow_with_the_model(opt_level: str) -> None:
    """Compare 5 with 15 layers: a loop that averages weights enters such a block in each iteration."""

    def block() -> None:
        with mpinit.float32_weights(model):
            pass

    calls = []
    for count in (5, 15):
        model = blocks(count)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, opt_level=opt_level)
        for _ in range(2):  # the first block makes what the others use
            with mpinit.scale_loss(model(torch.randn(4, 8)).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            block()
        calls.append(len(calls_made(block)))
    assert calls[0] == calls[1]


@pytest.mark.parametrize(
    "keywords",
    [
        {"opt_level": "O2"},
        {"opt_level": "O3"},
        {"opt_level": "O5"},
        {"opt_level": "O5", "master_weights": "split"},
        {"opt_level": "O2", "master_weights": "model"},
    ],
    ids=str,
)
def test_state_dict_makes_at_most_10_calls_a_tensor(keywords: dict[str, Any]) -> None:
    calls, tensors = [], []
    for count in (5, 15):
        model = blocks(count)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, **keywords)
        with mpinit.scale_loss(model(torch.randn(4, 8)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        tensors.append(len(model.state_dict()))
        calls.append(len(calls_made(model.state_dict)))
    assert (calls[1] - calls[0]) / (tensors[1] - tensors[0]) <= 10
