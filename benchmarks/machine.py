"""The machine, the versions and the settings of a measurement."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

PEERS: Final = ("torch-optimi", "torchao", "bitsandbytes", "flashoptim", "triton")
# One arena, no mmap, and no memory returned to the system: otherwise the allocator changed figures by up to 2x. Huge
# pages if Linux has them: with small pages the same program needed 0.75 to 1.09 times as long from run to run.
ENVIRONMENT: Final = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": "67108864",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Compile in the process itself: otherwise each process would start a pool of compiling processes.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def describe(device: str) -> dict[str, str | int]:
    """Return the machine and the versions, for the metadata of results."""
    peers = {f"version of {peer}": _version(peer) or "not installed" for peer in PEERS}
    return {
        "machine": name(device),
        "device": device,
        "cores": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"cuda": str(torch.version.cuda)} if device == "cuda" else {}),
        "mpinit": mpinit_version() or "not installed",
        **peers,
    }


def name(device: str) -> str:
    """Return the GPU's name, or the CPU's model."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def mpinit_version() -> str | None:
    """Return the version of the mpinit that is imported, also if it is not installed."""
    try:
        import mpinit
    except ImportError:
        return None
    return getattr(mpinit, "__version__", None) or _version("mpinit")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def slug(text: str) -> str:
    """Return a text as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
