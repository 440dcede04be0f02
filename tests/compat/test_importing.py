"""Importing apex: what answers to the name, for whom, and what stays inside.

Below the public face: every refused name of the table is imported.
"""

import ast
import importlib
import importlib.util
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpinit
from mpinit.compat import importing, uninstall_apex
from mpinit.compat.importing import MISSING


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    uninstall_apex()


@pytest.fixture
def installed() -> None:
    mpinit.install_as_apex()


@pytest.mark.usefixtures("installed")
def test_submodules_are_the_same_objects_under_both_names() -> None:
    apex = importlib.import_module("apex")
    for name in ("amp", "amp.handle", "parallel.distributed"):
        alias = importlib.import_module(f"apex.{name}")
        assert alias is importlib.import_module(f"mpinit.compat.apex.{name}")
        assert alias.__spec__ is not None
        assert alias.__spec__.name.startswith("mpinit.compat"), "or relative imports inside would warn"
    assert apex.__version__ == f"0.1+mpinit.{mpinit.__version__}"


@pytest.mark.usefixtures("installed")
def test_amp_reads_as_scripts_read_it() -> None:
    from apex import amp  # type: ignore[import-not-found]
    from apex.amp import scale_loss

    importlib.import_module("apex.amp._amp_state")
    assert amp._amp_state is sys.modules["apex.amp._amp_state"]._amp_state, "the import did not put the module there"
    assert scale_loss is amp.scale_loss
    for name in ("state_dict", "load_state_dict", "initialize", "master_params", "disable_casts"):
        assert name in amp.__dict__


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "statement",
    [
        "from apex.fp16_utils import FP16_Optimizer",
        "import apex.fp16_utils.fp16_optimizer",
        "import pickle; pickle.loads(b'capex.fp16_utils.loss_scaler\\nDynamicLossScaler\\n.')",
    ],
)
def test_optimizers_and_scalers_of_fp16_utils_are_refused(statement: str) -> None:
    with pytest.raises(ImportError, match=r"apex\.fp16_utils\..* is not .*mpinit\.initialize\(.*mpinit\.scale_loss"):
        exec(statement)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", [name for name in MISSING if "fp16_utils" not in name])
def test_replaced_names_of_apex_are_refused_by_name(name: str) -> None:
    package, _, attribute = name.rpartition(".")
    for statement in (f"from {package} import {attribute}", f"import {name}"):
        with pytest.raises(ImportError, match=f"In its place, {re.escape(MISSING[name])}"):
            exec(statement)


@pytest.mark.usefixtures("installed")
def test_import_inside_try_of_scripts_own_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    importing._refused.cache_clear()
    statement = "from apex.optimizers import FusedAdam, FusedMixedPrecisionLamb"
    for _ in range(2):
        with pytest.raises(ImportError, match="Please install apex"):
            exec(f"try:\n    {statement}\nexcept ImportError:\n    raise ImportError('Please install apex')")
    [said] = [record.getMessage() for record in caplog.records if record.name == "mpinit"]
    assert said.startswith("apex.optimizers.FusedMixedPrecisionLamb is not") and "FusedLAMB" in said


@pytest.mark.usefixtures("installed")
def test_availability_checks() -> None:
    apex = importlib.import_module("apex")
    for statement in ("from apex import contrib", "from apex.optimizers import FusedMixedPrecisionLamb"):
        with pytest.raises(ImportError):
            exec(statement)
    assert not hasattr(apex, "no_such_thing")
    assert importlib.util.find_spec("apex.contrib") is None
    for name in ("amp_C", "apex_C", "apex.contrib", "apex.contrib.optimizers", "apex.transformer", "apex.amp.nothing"):
        with pytest.raises(ImportError):
            importlib.import_module(name)
    applier = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    assert applier.available is False
    with pytest.raises(RuntimeError, match="available"):
        applier(None, None, [])


@pytest.mark.usefixtures("installed")
def test_pickles_load_under_both_names() -> None:
    from apex.parallel import SyncBatchNorm  # type: ignore[import-not-found]

    saved = pickle.dumps(SyncBatchNorm(2))
    assert b"apex.parallel" in saved
    uninstall_apex()
    assert type(pickle.loads(saved)).__name__ == "SyncBatchNorm"


def test_installing_twice_and_uninstalling_leave_nothing() -> None:
    finders, path = list(sys.meta_path), list(sys.path)
    mpinit.install_as_apex()
    mpinit.install_as_apex()
    assert len(sys.meta_path) == len(finders) + 1
    importlib.import_module("apex.amp")
    uninstall_apex()
    assert sys.meta_path == finders
    assert sys.path == path
    assert not [name for name in sys.modules if name.split(".")[0] == "apex"]
    with pytest.raises(ImportError):
        importlib.import_module("apex")


@pytest.fixture
def real_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package laid out like an apex of today: no amp, its own optimizers, some of parallel."""
    files = {
        "apex/__init__.py": "from . import optimizers\n__version__ = '25.1'\n",
        "apex/optimizers/__init__.py": "class FusedAdam:\n    real = True\n",
        "apex/parallel/__init__.py": "from .sync import SyncBatchNorm\n",
        "apex/parallel/sync.py": "class SyncBatchNorm:\n    real = True\n",
        "apex/contrib/__init__.py": "here = True\n",
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def check_amp_alone_is_ours(real: Path) -> None:
    apex = importlib.import_module("apex")
    assert str(apex.__file__).startswith(str(real))
    assert apex.__version__ == "25.1"
    assert apex.optimizers.FusedAdam.real
    assert not hasattr(apex.optimizers, "FusedLAMB")
    assert apex.amp is importlib.import_module("mpinit.compat.apex.amp")
    assert importlib.import_module("apex.amp.frontend").initialize is apex.amp.initialize
    assert importlib.import_module("apex.parallel").SyncBatchNorm.real
    assert importlib.import_module("apex.contrib").here
    for absent in ("apex.normalization", "apex.fp16_utils"):
        with pytest.raises(ImportError):
            importlib.import_module(absent)


@pytest.mark.parametrize("before", [(), ("apex",), ("apex.parallel", "apex.contrib")], ids=str)
def test_only_amp_of_a_real_apex_is_replaced(real_apex: Path, before: tuple[str, ...]) -> None:
    for name in before:
        importlib.import_module(name)
    mpinit.install_as_apex()
    check_amp_alone_is_ours(real_apex)


def test_an_amp_that_no_longer_runs_is_not_imported(real_apex: Path) -> None:
    (real_apex / "apex" / "amp.py").write_text("from torch._six import inf\n")
    with (real_apex / "apex" / "__init__.py").open("a") as file:
        file.write("from . import amp\n")
    mpinit.install_as_apex()
    check_amp_alone_is_ours(real_apex)


def test_broken_apex_is_ignored(real_apex: Path, caplog: pytest.LogCaptureFixture) -> None:
    (real_apex / "apex" / "__init__.py").write_text(
        "from . import optimizers, parallel\nfrom . import built_for_another\n"
    )
    mpinit.install_as_apex()
    apex = importlib.import_module("apex")
    assert apex is importlib.import_module("mpinit.compat.apex")
    assert importlib.import_module("apex.optimizers") is apex.optimizers
    assert importlib.import_module("apex.amp._amp_state")._amp_state is apex.amp._amp_state
    assert not hasattr(apex.optimizers.FusedAdam, "real")
    assert "built_for_another" in caplog.text
    with pytest.raises(ImportError):
        importlib.import_module("apex.contrib")


def test_other_project_named_apex_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("legends = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mpinit.install_as_apex()
    assert importlib.import_module("apex").amp.initialize


PACKAGE = Path(mpinit.__file__).parent
# Functions that import it. Of names that mpinit finds when they are asked for only type checkers see an import.
DOORS = {"cli/run.py": {"run"}}
OUTSIDE = sorted(path for path in PACKAGE.rglob("*.py") if "compat" not in path.relative_to(PACKAGE).parts)

# Names that only apex's amp gave to things.
QUIRKS = re.compile(
    r"_amp_stash|_amp_state|_lazy_init|_prepare_amp|_post_amp|_amp_lazy|_master_params_to_model|sys\.meta_path"
)


def imports_of_compat(tree: ast.AST) -> list[ast.stmt]:
    imports = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return [node for node in imports if "compat" in parts(node)]


def parts(node: ast.Import | ast.ImportFrom) -> set[str]:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names.append(node.module or "")
    return {part for name in names for part in name.split(".")}


def test_files_outside_of_compat_are_found() -> None:
    assert len(OUTSIDE) > 15
    assert imports_of_compat(ast.parse("from .compat.importing import install_as_apex"))


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_compat_is_imported_by_two_functions_only(path: Path) -> None:
    if path == PACKAGE / "__init__.py":  # for the name install_as_apex
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    allowed = DOORS.get(str(path.relative_to(PACKAGE)), set())
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name in allowed]
    inside = [node for function in functions for node in imports_of_compat(function)]
    assert imports_of_compat(tree) == inside
    assert len(inside) == len(allowed)


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_of_apex_are_only_in_compat(path: Path) -> None:
    found = set(QUIRKS.findall(path.read_text(encoding="utf-8")))
    # The one other finder of modules: for parts of torch that are patched when they are imported.
    assert found <= ({"sys.meta_path"} if path.name == "patches_on_import.py" else set())


# What the faces take from the rooms below: what users can use, and these.
FACE = sorted(path for path in (PACKAGE / "compat").rglob("*.py") if "bootstrap" not in path.parts)
SHORT_LIST = {"amp"}
# And these, which one module takes for all of them: which session an object belongs to, what its scalers are, and how
# DistributedDataParallel averages in float32; and the key of a checkpoint that is no scaler.
CORE = {"amp", "autocast.installation", "registry", "scaling.scaler", "optimizer.gradients", "initialization", "config"}


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


def test_compat_uses_internals_through_one_module() -> None:
    core = PACKAGE / "compat" / "_core.py"
    everything = set().union(*(taken(path) for path in FACE if path != core))
    assert {name for name in everything if name.split(".")[0] != "basics"} == SHORT_LIST
    assert taken(core) == CORE
