"""Compilation of ``native_code``, which only ``mpinit build-native`` runs.

torch.utils.cpp_extension.load is not used: it needs ninja, and may compile in every process that loads the result.
"""

import importlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

import torch

from .native import SOURCES, library

_FLAGS: Final = {"AVX512": ("-march=native", "-mprefer-vector-width=512"), "AVX2": ("-mavx2", "-mfma", "-mf16c")}
_HOW_TO_INSTALL: Final = "apt install g++, dnf install gcc-c++ or, on macOS, xcode-select --install"


def build(force: bool = False) -> bool:
    """Compile ``native_code`` for this machine, unless it is compiled already.

    Args:
        force: compile it again. Default False.

    Returns:
        True if the compiler ran.

    Raises:
        RuntimeError: the system, a compiler or Python's headers are missing, or the compiler failed.
    """
    path = library()
    if path.exists() and not force:
        return False
    if os.name != "posix":
        raise RuntimeError(f"native code is built on Linux and macOS, not on {platform.system()}")
    # Imported here because the import lasts a second.
    cpp_extension: Any = importlib.import_module("torch.utils.cpp_extension")
    compiler = shlex.split(cpp_extension.get_cxx_compiler())
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(
            f"there is no C++ compiler {compiler[0]!r}: install one ({_HOW_TO_INSTALL}), or name yours in CXX"
        )
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    if not Path(includes[-1], "Python.h").exists():
        raise RuntimeError(f"Python's headers are not in {includes[-1]}: install them (apt install python3-dev)")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The rename is atomic: a process that loads the module meanwhile reads the old file or the new one.
    unfinished = path.with_name(f"{os.getpid()}.so")
    arguments = _arguments(includes, ["-L" + cpp_extension.TORCH_LIB_PATH], unfinished)
    try:
        _compile([*compiler, *arguments], path.with_name("log"))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return True


def _compile(command: list[str], log: Path) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode != 0:
        log.write_bytes(done.stdout)
        lines = done.stdout.decode(errors="replace").splitlines()
        first = next((line for line in lines if "error" in line), f"exit status {done.returncode}")
        raise RuntimeError(f"the compiler {command[0]!r} has failed ({first.strip()}); all of its output is in {log}")


def _arguments(includes: list[str], folders: list[str], output: Path) -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    is_arm = platform.machine() in ("arm64", "aarch64")
    source = next(path for path in SOURCES if path.suffix == ".cpp")
    return [
        *("-std=c++20", "-O3", "-shared", "-fPIC", "-w", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
        *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-fopenmp",)),
        *_FLAGS.get(capability, ("-mcpu=native",) if is_arm else ()),
        f"-DONE_ROUNDING={str(capability in _FLAGS or is_arm).lower()}",
        *(word for path in includes for word in ("-isystem", path)),
        *(str(source), "-o", str(output), *folders, "-ltorch_cpu", "-ltorch_python", "-lc10"),
    ]
