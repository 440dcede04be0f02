"""``mpinit build-native``: builds once, tries the result on samples, says what is missing.

Below the public face: a compiler and its result are replaced by ones that fail.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpinit.cli import build_native, main
from mpinit.masters.codecs import codec
from mpinit.optimizer import one_pass
from mpinit.torch_internals import native as native_code
from mpinit.torch_internals import native_build

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is built where the command looks."""
    monkeypatch.delenv("MPINIT_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(native_code, "_module", native_code._NOT_TRIED)
    for owner in (one_pass, codec):
        monkeypatch.setattr(owner, "_has_same_bits", {})
    return tmp_path


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs the command; its status and what it printed, wrapped lines put together."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["build-native", *arguments])
        captured = capsys.readouterr()
        return status, " ".join(captured.out.split()), captured.err

    return run


@pytest.fixture
def compiles(native: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Copy the libraries that the test run compiled instead of compiling; return the compiler's commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        shutil.copy(native.__spec__.origin, command[command.index("-o") + 1])
        return SimpleNamespace(returncode=0, stdout=b"")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_native_code_is_built_once(said: Said, compiles: list[list[str]], own_folder: Path) -> None:
    path = native_code.library()
    status, out, err = said()
    assert (status, err) == (0, "")
    assert out.startswith("built in ") and str(path) in out.replace(" ", "")
    assert "usable: steps of Adam, AdamW, SGD and encoded states have torch's bits on samples" in out
    assert os.listdir(path.parent) == ["mpinit_native.so"], "nothing unfinished is left"
    status, out, _ = said()
    assert status == 0 and out.startswith("already built: ") and "usable" in out
    assert len(compiles) == 1
    assert said("--force")[1].startswith("built in ")
    assert len(compiles) == 2
    assert not {"sh", "bash"} & {os.path.basename(command[0]) for command in compiles}


def test_json(said: Said, compiles: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPINIT_NATIVE", "0")
    found = json.loads(said("--json")[1])
    assert found.pop("seconds") >= 0
    expected = {"path": str(native_code.library()), "built": True, "usable": True, "other_bits": []}
    assert found == {**expected, "switched_off": True}
    assert "MPINIT_NATIVE=0 is set: it is not used" in said()[1]


def test_code_of_other_bits_is_named(
    said: Said, compiles: list[list[str]], native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = {name: getattr(native, name) for name in ("encode", "decode", "round", "step")}

    def step(groups: Any, *more: Any) -> Any:
        _, _, (is_adam, *_), _ = groups[0]
        return -1 if is_adam else native.step(groups, *more)

    monkeypatch.setattr(build_native, "load", lambda path: SimpleNamespace(**{**functions, "step": step}))
    status, out, err = said()
    assert status == 2 and "usable" not in out
    assert "AdamW (fused, split masters)" in err and "SGD" not in err and "torch's operations" in err
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_loaded(said: Said) -> None:
    path = native_code.library()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no library")
    status, _, err = said()
    assert status == 2 and f"{path} cannot be loaded" in err and "--force" in err


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("no-such-compiler -m64", "there is no C++ compiler 'no-such-compiler': install one (apt install g++"),
        ("false", "the compiler 'false' has failed (exit status 1); all of its output is in "),
    ],
)
def test_missing_compiler_is_reported(
    said: Said, monkeypatch: pytest.MonkeyPatch, own_folder: Path, compiler: str, message: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    status, out, err = said()
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1
    assert not list(own_folder.rglob("*.so"))


def test_missing_python_headers_are_reported(said: Said, monkeypatch: pytest.MonkeyPatch, own_folder: Path) -> None:
    monkeypatch.setattr(native_build.shutil, "which", lambda name: "/usr/bin/c++")
    monkeypatch.setattr(native_build.sysconfig, "get_paths", lambda: {"include": str(own_folder)})
    status, _, err = said()
    assert status == 2 and f"Python's headers are not in {own_folder}" in err and "python3-dev" in err


@pytest.mark.long
def test_a_real_compiler_and_a_training_that_uses_what_it_made(tmp_path: Path, native: Any) -> None:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "mpinit", "build-native"]
    script = (
        "import torch, mpinit\n"
        "model = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "mpinit.initialize(model, optimizer, 'O5')\n"
        "for _ in range(3):\n"
        "    with mpinit.scale_loss(model(torch.ones(2, 64)).square().mean(), optimizer) as loss: loss.backward()\n"
        "    optimizer.step()\n"
        "print(mpinit.describe(model))\n"
    )

    def run(*words: str) -> str:
        return subprocess.run(words, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout

    assert "native code: not built" in run(sys.executable, "-c", script)
    assert run(*command).startswith("built in ")
    assert "native code: built, used" in run(sys.executable, "-c", script)
    assert run(*command).startswith("already built")
