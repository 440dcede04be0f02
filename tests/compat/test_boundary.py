"""Nothing outside of mpinit/compat knows that apex existed: two doors lead there, and both open lazily."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from forked_runs import run_code

import mpinit

PACKAGE = Path(mpinit.__file__).parent
DOORS = {"__init__.py": {"install_as_apex"}, "cli/run.py": {"run"}}
OUTSIDE = sorted(path for path in PACKAGE.rglob("*.py") if "compat" not in path.relative_to(PACKAGE).parts)

# Names that only apex's amp gave to things.
QUIRKS = re.compile(
    r"_amp_stash|_amp_state|_lazy_init|_prepare_amp|_post_amp|_amp_lazy|_master_params_to_model|sys\.meta_path"
)


def imports_of_compat(tree: ast.AST) -> list[ast.stmt]:
    return [
        node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) and "compat" in parts(node)
    ]


def parts(node: ast.Import | ast.ImportFrom) -> set[str]:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names.append(node.module or "")
    return {part for name in names for part in name.split(".")}


def test_there_is_an_outside() -> None:
    assert len(OUTSIDE) > 15
    assert imports_of_compat(ast.parse("from .compat.running import run_script"))


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_two_doors_import_it_and_only_when_used(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    allowed = DOORS.get(str(path.relative_to(PACKAGE)), set())
    inside = [
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in allowed
        for node in imports_of_compat(function)
    ]
    assert imports_of_compat(tree) == inside
    assert len(inside) == len(allowed)


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_quirk_leaks_out(path: Path) -> None:
    found = set(QUIRKS.findall(path.read_text(encoding="utf-8")))
    # The one other finder of modules: for parts of torch that are patched when they are imported.
    assert found <= ({"sys.meta_path"} if path.name == "patches_on_import.py" else set())


def test_importing_mpinit_does_not_import_it() -> None:
    code = "import sys, mpinit; sys.exit(any('compat' in name.split('.') for name in sys.modules if 'mpinit' in name))"
    done = run_code(code)
    assert done.returncode == 0, done.stderr


# What the faces take from the rooms below: what users can use, and these.
FACE = sorted(path for path in (PACKAGE / "compat").rglob("*.py") if "bootstrap" not in path.parts)
SHORT_LIST = {
    "amp": "the functions users call",
}
# And these, which one module takes for all of them.
CORE = {
    "registry": "which session an object belongs to",
    "scaling.scaler": "what its scalers are",
}


def taken(path: Path) -> set[str]:
    """The package's own modules outside of compat that a file of the face imports."""
    own = [*path.relative_to(PACKAGE).with_suffix("").parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = own[: len(own) - node.level + 1]
            if "compat" not in base:
                found |= {".".join([*base, node.module] if node.module else [*base, a.name]) for a in node.names}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not [name for name in names if name.split(".")[0] == "mpinit"], "imports inside are relative"
    return found


def test_the_faces_take_what_users_can_use_and_one_module_the_rest() -> None:
    core = PACKAGE / "compat" / "_core.py"
    everything = set().union(*(taken(path) for path in FACE if path != core))
    beyond = {name for name in everything if name not in SHORT_LIST and name.split(".")[0] != "basics"}
    assert not beyond, f"mpinit/compat takes {beyond} from the rooms below"
    assert set(SHORT_LIST) <= everything, "the list can be shorter"
    assert taken(core) == set(CORE)
