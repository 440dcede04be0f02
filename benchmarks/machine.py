"""What the figures were taken on, and with which settings."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

PEERS: Final = ("torch-optimi", "torchao", "bitsandbytes", "flashoptim", "triton")
# One arena, nothing by mmap and nothing given back to the system: figures moved by 2x with what the allocator did. Huge
# pages where Linux gives them: with small ones the same program took 0.75 to 1.09 of its time, as it met the caches.
ENVIRONMENT: Final = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": "67108864",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # In the process itself: a pool of compiling processes would have to be started by each.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def describe(device: str) -> dict[str, str | int]:
    """Machine and versions, as the results name them."""
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
    """The GPU's name, or the CPU's model."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def mpinit_version() -> str | None:
    """The version of the mpinit in use, installed or not."""
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
    """A name fit for a file."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
