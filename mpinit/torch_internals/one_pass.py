"""``one_pass.cpp``: built by the machine's C++ compiler when a process has shown that it pays, and kept for others.

Nothing waits for the compiler: it runs beside the training, and what it makes is loaded as soon as it is there. It is
kept where torch keeps the extensions that it builds (``TORCH_EXTENSIONS_DIR``), under what it was made for: the source,
torch, Python and the CPU. Where there is no compiler, or with ``MPINIT_NATIVE=0``, torch's own operations do the same.
"""

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

import torch
from torch import _appdirs

from ..basics.logs import log

_SOURCE: Final = Path(__file__).with_suffix(".cpp")
# Compiling takes about ten seconds of a core: started once a process has spent this long on what it would save.
_WORTH_SECONDS: Final = 1.0
_FLAGS: Final = {"AVX512": ("-march=native", "-mprefer-vector-width=512"), "AVX2": ("-mavx2", "-mfma", "-mf16c")}


class NativeCode:
    """The functions of ``one_pass.cpp``, once they are there; kept in ``folder``, or where torch keeps extensions."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._module: Any = None
        self._compiler: subprocess.Popen[bytes] | None = None
        self._missed = 0.0
        self.may_come = os.name == "posix" and os.environ.get("MPINIT_NATIVE") != "0"
        # Whether what was kept was looked for.
        self._has_looked = False

    def get(self) -> Any | None:
        """The module; None where it is not there, or not yet."""
        is_built = self._compiler is not None and self._compiler.poll() is not None
        if self._module is None and self.may_come and (is_built or not self._has_looked):
            self._has_looked = True
            self._load(is_built)
        return self._module

    def miss(self, seconds: float) -> None:
        """So much time was spent without it."""
        self._missed += seconds
        if self._missed >= _WORTH_SECONDS and self.may_come and self._module is None and self._compiler is None:
            self._build()

    def wait(self) -> Any | None:
        """:meth:`get`, after building it where it is not there."""
        if self.get() is None and self.may_come:
            if self._compiler is None:
                self._build()
            if self._compiler is not None:
                self._compiler.wait()
        return self.get()

    def _path(self) -> Path:
        made_for: list[Any] = [_SOURCE.read_text("utf-8"), Path(__file__).read_text("utf-8"), torch.__version__]
        made_for += [torch.version.git_version, sys.implementation.cache_tag]
        made_for += [platform.machine(), torch.backends.cpu.get_cpu_capability(), _cpu_flags()]
        name = hashlib.sha256("\n".join(map(str, made_for)).encode()).hexdigest()[:16]
        user_cache: Any = _appdirs.user_cache_dir
        kept = os.environ.get("TORCH_EXTENSIONS_DIR") or user_cache("torch_extensions")
        return (self._folder or Path(kept, "mpinit")) / name / "one_pass.so"

    def _build(self) -> None:
        try:
            path = self._path()
            path.parent.mkdir(parents=True, exist_ok=True)
            made = path.with_name(f"{os.getpid()}.so")
            compile_it, put_in_place = shlex.join(_command(made)), shlex.join(["mv", "-f", str(made), str(path)])
            with path.with_name("log").open("wb") as output:
                # It ends its work also where this process is over before: the next one finds it. Moved in one piece.
                self._compiler = subprocess.Popen(
                    ["sh", "-c", f"{compile_it} && {put_in_place}"],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
        except Exception as error:
            self._give_up(error)

    def _load(self, is_built: bool) -> None:
        try:
            path = self._path()
            if not path.exists():
                if is_built:
                    raise OSError(f"the compiler has failed, see {path.with_name('log')}")
                return
            loader = importlib.machinery.ExtensionFileLoader("one_pass", str(path))
            spec = importlib.machinery.ModuleSpec("one_pass", loader, origin=str(path))
            self._module = importlib.util.module_from_spec(spec)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.may_come = False
        log.info("steps are done, and states are encoded, without native code: %s", error)


def _command(made: Path) -> list[str]:
    # It takes a while to import, and only a build needs it.
    cpp_extension: Any = importlib.import_module("torch.utils.cpp_extension")
    capability = torch.backends.cpu.get_cpu_capability()
    is_arm = platform.machine() in ("arm64", "aarch64")
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = [f"-L{cpp_extension.TORCH_LIB_PATH}", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    return [
        *(*shlex.split(cpp_extension.get_cxx_compiler()), "-std=c++20", "-O3", "-shared", "-fPIC", "-w"),
        *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
        *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-fopenmp",)),
        *_FLAGS.get(capability, ("-mcpu=native",) if is_arm else ()),
        f"-DONE_ROUNDING={str(capability in _FLAGS or is_arm).lower()}",
        *(word for path in includes for word in ("-isystem", path)),
        *(str(_SOURCE), "-o", str(made), *libraries),
    ]


def _cpu_flags() -> str:
    """What the processor can do, where the system says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


NATIVE: Final = NativeCode()
