"""The loader of ``native_code``, a C++ module that ``mpinit build-native`` compiles.

A training process never compiles it. Without it, or with ``MPINIT_NATIVE=0``, torch's operations compute the same bits.
"""

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch import _appdirs

from ..basics.logs import log

# module.cpp includes the others.
SOURCES: Final = sorted(Path(__file__).with_name("native_code").glob("*.[ch]*"))
# This file has the compiler's flags, so its text is hashed too.
_BUILDER: Final = Path(__file__).with_name("native_build.py")

_MODULE: Final = "mpinit_native"
_NOT_TRIED: Final = object()
_module: Any = _NOT_TRIED


def native() -> Any | None:
    """Return the module, loaded at the first call; None if it is not built or is switched off."""
    if _module is _NOT_TRIED:
        use_native(None if is_switched_off() else _load_if_built())
    return _module


def use_native(module: Any | None) -> None:
    """Use this module in this process from now on; None: use torch's operations."""
    global _module
    _module = module


def is_switched_off() -> bool:
    """Return whether ``MPINIT_NATIVE=0`` is set."""
    return os.environ.get("MPINIT_NATIVE") == "0"


def describe_native() -> str:
    """Describe whether the module is loaded, and if not, why."""
    if native() is not None:
        return "built"
    if is_switched_off():
        return "switched off by MPINIT_NATIVE=0"
    if library().exists():
        return "built, but cannot be loaded; `mpinit build-native --force` builds it again"
    return "not built, `mpinit build-native` builds it"


def library() -> Path:
    """Return the path of the module for this source, torch, Python and CPU. The file need not exist.

    It is in torch's folder of extensions (``TORCH_EXTENSIONS_DIR``).
    """
    built_for: list[Any] = [path.read_text("utf-8") for path in (*SOURCES, _BUILDER)]
    built_for += [torch.__version__, torch.version.git_version, sys.implementation.cache_tag]
    built_for += [platform.machine(), torch.backends.cpu.get_cpu_capability(), _cpu_flags()]
    name = hashlib.sha256("\n".join(map(str, built_for)).encode()).hexdigest()[:16]
    user_cache: Any = _appdirs.user_cache_dir
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or user_cache("torch_extensions")
    return Path(folder, "mpinit", name, f"{_MODULE}.so")


def load(path: Path) -> Any:
    """Load the module from a file."""
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.machinery.ModuleSpec(_MODULE, loader, origin=str(path))
    return importlib.util.module_from_spec(spec)


def _load_if_built() -> Any | None:
    path: Path | None = None
    try:
        path = library()
        return load(path) if path.exists() else None
    except (OSError, ImportError) as error:
        log.warning("native code is not used, as %s cannot be loaded: %s", path, error)
        return None


def _cpu_flags() -> str:
    """Return the CPU's features, as listed by Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
