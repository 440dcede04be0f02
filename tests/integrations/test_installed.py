"""Frameworks that are installed can be imported: no test of one is skipped because of a broken installation."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from forked_runs import run_code
from frameworks import is_installed, needs

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
# Distributions whose modules have another name.
MODULES = {"pytorch-ignite": "ignite", "mmengine-lite": "mmengine", "opencv-python-headless": "cv2"}
MODULES |= {"ultralytics-opencv-headless": "ultralytics", "pyro-ppl": "pyro"}
# They change the process that imports them, ``torch.save`` for example.
ALONE = ("ultralytics",)
NAMES = sorted(
    {
        re.split(r"[<>=\[]", requirement)[0]
        for extra in ("accelerate", "transformers", "lightning", "timm", "integrations", "recipes", "libraries")
        for requirement in EXTRAS[extra]
    }
    - {"mpinit"}
)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_framework_that_is_installed_can_be_imported(name: str) -> None:
    module = MODULES.get(name, name.replace("-", "_"))
    if module not in ALONE:
        assert needs(module).__name__ == module
    elif is_installed(module):
        done = run_code(
            f"import sys, warnings; warnings.simplefilter('ignore'); sys.path[:] = {sys.path}; import {module}"
        )
        assert done.returncode == 0, done.stderr


PROGRAM = """
import torch, torchvision
boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
print(torchvision.ops.nms(boxes, torch.tensor([0.5, 0.9]), 0.5).tolist())
"""


@pytest.mark.long
def test_torchvision_is_of_the_same_index_as_torch() -> None:
    """Report a mismatch as an expected failure, with its reason: the operators are only declared for these tests."""
    if not is_installed("torchvision"):
        pytest.skip("torchvision is not installed")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    if "operator torchvision::nms does not exist" in done.stderr:
        pytest.xfail("torchvision is of another index than torch: its operators are declared here, and cannot run")
    assert done.stdout.strip() == "[1]", done.stderr


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist')", RuntimeError),
        ("raise ImportError('cannot import name of another version')", ImportError),
        ("import a_package_that_nobody_has", ModuleNotFoundError),
    ],
)
def test_an_import_that_fails_is_no_reason_to_skip(
    source: str, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_broken_framework.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(kind):
        needs("a_broken_framework")
    assert "a_broken_framework" not in sys.modules
    with pytest.raises(pytest.skip.Exception, match="a_missing_framework is not installed"):
        needs("a_missing_framework.part")


def test_tests_skip_for_packages_that_are_not_installed_alone() -> None:
    found = [
        path.name
        for path in (ROOT / "tests").rglob("*.py")
        if "importorskip" + "(" in path.read_text(encoding="utf-8") and path != Path(__file__)
    ]
    # Of torch itself, which has the module in some versions.
    assert found == ["test_compiled_training.py"]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_installs_torch_and_torchvision_from_one_index(tmp_path: Path) -> None:
    index = "https://download.pytorch.org/whl/cpu"
    command = ["make", "--dry-run", "test-long", f"VENV={tmp_path / 'venv'}", f"TORCH_INDEX={index}"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    installs = [line for line in shown.splitlines() if "pip install" in line and '"torchvision' in line]
    assert installs and all('"torch==' in line for line in installs)
    assert f'--index-url "{index}"' in installs[0], "before anything that depends on torchvision"
    assert "--index-url" not in installs[-1] and "--editable" in installs[-1]


ROWS = re.findall(
    r"^\| ([\w-]+) \| (\d[\w.]*) \|$", (ROOT / "docs" / "how-to" / "frameworks.md").read_text(encoding="utf-8"), re.M
)


def test_every_framework_has_a_row_in_the_table_of_versions() -> None:
    assert sorted(name for name, _ in ROWS) == NAMES


@pytest.mark.parametrize(("name", "version"), ROWS)
def test_no_row_claims_a_newer_version_than_is_installed(name: str, version: str) -> None:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text.partition("+")[0])]

    assert numbers(version) <= numbers(found)
