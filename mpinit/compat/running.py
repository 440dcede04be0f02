"""Running a script or module as ``__main__`` with the name ``apex`` provided."""

from __future__ import annotations

import builtins
import io
import os
import re
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from .importing import BOOTSTRAP, install_as_apex

# How torch says, in its many places, that there is no CUDA device or no NCCL.
_NO_DEVICE: Final = re.compile(
    r"not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|no CUDA-capable device|cuda\.is_available\(\) is False"
    r"|torch\._C' has no attribute '_cuda|dummy base class|torch\.cuda\.\w+Tensor not available|CUDA driver"
    r"|NCCL built in|NCCL support is not compiled|NCCL is not available|only supported with GPUs|no GPUs found"
    r"|requires at least one CUDA device",
    re.IGNORECASE,
)


def run_script(path: str, arguments: Sequence[str]) -> int:
    """Run a file as ``python path arguments...`` would, with ``apex`` provided.

    Args:
        path: a Python file, or a directory or zip file with a ``__main__.py``.
        arguments: the script's own arguments.

    Returns:
        The exit status: 0, or 1 where the script stopped for want of a CUDA device. Other exceptions pass through.
    """
    file = Path(path)
    if not file.exists():
        print(f"mpinit run: no such file: {path!r}", file=sys.stderr)
        return 2
    _prepare([path, *arguments], str(file.resolve().parent))
    if file.is_dir() or file.suffix in (".zip", ".pyz"):
        return _guard(lambda: runpy.run_path(path, run_name="__main__"))
    with io.open_code(str(file.resolve())) as opened:
        source = opened.read()
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    # For good, not for the length of the run: exit handlers, threads and pickles look the script's names up there.
    sys.modules["__main__"] = main
    return _guard(lambda: exec(compile(source, path, "exec"), main.__dict__))


def run_module(name: str, arguments: Sequence[str]) -> int:
    """Run a module as ``python -m name arguments...`` would, with ``apex`` provided.

    Args:
        name: its dotted name.
        arguments: the module's own arguments.

    Returns:
        The exit status, as for :func:`run_script`.
    """
    _prepare([name, *arguments], os.getcwd())
    return _guard(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _prepare(argv: list[str], first_on_path: str) -> None:
    sys.argv[:] = argv
    if not sys.flags.safe_path and sys.path:
        sys.path[0] = first_on_path  # in place of the directory of the mpinit command
    install_as_apex()
    # Processes that the script spawns inherit sys.path and nothing else of this.
    sys.path.insert(1, BOOTSTRAP)


def _guard(run: Callable[[], object]) -> int:
    # torch says this on the way to the error that is reported below.
    warnings.filterwarnings("ignore", message="Attempted to get default timeout for nccl backend")
    try:
        run()
    except Exception as error:
        if not _is_for_want_of_a_device(error):
            raise
        print(_device_message(error), file=sys.stderr)
        return 1
    return 0


def _is_for_want_of_a_device(error: Exception) -> bool:
    import torch

    return not torch.cuda.is_available() and _NO_DEVICE.search(str(error)) is not None


def _device_message(error: Exception) -> str:
    import torch

    where = _script_frame(error)
    place = f"{where.filename}, line {where.lineno}: `{where.line}` " if where is not None else "the script "
    reason = next(line for line in str(error).splitlines() if _NO_DEVICE.search(line)).strip()
    return (
        f"mpinit run: {place}needs a CUDA device, and this machine has none that torch {torch.__version__} can use "
        f"({type(error).__name__}: {reason}). Run the script on a machine with a CUDA device and a CUDA build of "
        "torch, or change it to the CPU: no .cuda(), device='cpu', backend='gloo'"
    )


def _script_frame(error: Exception) -> traceback.FrameSummary | None:
    """The innermost line that is neither torch's, nor the standard library's, nor ours."""
    import torch

    foreign = (str(Path(torch.__file__).parent), str(Path(os.__file__).parent), str(Path(__file__).parent.parent), "<")
    site = f"{os.sep}site-packages{os.sep}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(foreign) and site not in frame.filename]
    return own[-1] if own else None
