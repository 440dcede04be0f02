"""A simulated accelerator, ``sim``: what the tests do on it, a GPU would be asked to do.

``start()`` builds it with torch's own extension builder, once a version of torch, and makes it this process's
accelerator, for good: torch has no way back. Tests run on it in a process of its own, ``pytest --device sim``.

Beside what every device has, ``sim()`` counts (``counted``), fails (``failing_at``), and keeps what it frees poisoned
(``poisoned``).
"""

import contextlib
import fcntl
import functools
import os
import re
import shutil
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_suffix("").parent / "simulated_device.cpp"


def missing() -> str | None:
    """Why there can be no such device here; None where there can."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "the simulated device needs a C++ compiler, and there is no c++ (or $CXX) here: install g++"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the simulated device needs Python's headers, and there is no Python.h here: install python3-dev"
    if _path_with_ninja() is None:
        return "the simulated device needs ninja, which torch's extension builder runs: pip install ninja"
    return None


def _path_with_ninja() -> str | None:
    """What PATH is to be: ninja, installed beside this Python, need not be on it."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return None if shutil.which("ninja", path=path) is None else path


@functools.cache
def start() -> Any:
    """Build it where that has not been done, and make it this process's accelerator; the extension's module."""
    from torch.utils import cpp_extension

    os.environ["PATH"] = _path_with_ninja() or ""
    name = "simulated_device_" + re.sub(r"\W", "_", torch.__version__)
    folder = Path(cpp_extension.get_default_build_root()) / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "one_at_a_time", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # torch's own lock is a file that a process leaves behind where it is killed: this one goes with it.
        (folder / "lock").unlink(missing_ok=True)
        device = cpp_extension.load(name, [str(SOURCE)], extra_cflags=["-O1"], build_directory=str(folder))
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    _CELLS.impl("_thnn_fused_lstm_cell", _lstm_cell, "AutogradPrivateUse1")
    _CELLS.impl("_thnn_fused_gru_cell", _gru_cell, "AutogradPrivateUse1")
    return device


_CELLS = torch.library.Library("aten", "IMPL")


def _lstm_cell(ours: Any, hidden: Any, cell: Any, bias: Any = None, hidden_bias: Any = None) -> Any:
    """torch asks devices of its own for the cells of its recurrent networks, which the CPU makes of these."""
    gates = ours + hidden if bias is None else ours + bias + (hidden + hidden_bias)
    first, forget, new, last = gates.chunk(4, 1)
    cell = forget.sigmoid() * cell + first.sigmoid() * new.tanh()
    return last.sigmoid() * cell.tanh(), cell, gates


def _gru_cell(ours: Any, hidden: Any, before: Any, bias: Any = None, hidden_bias: Any = None) -> Any:
    if bias is not None:
        ours, hidden = ours + bias, hidden + hidden_bias
    (reset, update, new), (reset_h, update_h, new_h) = ours.chunk(3, 1), hidden.chunk(3, 1)
    new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return (before - new) * (update + update_h).sigmoid() + new, hidden


def _module() -> types.ModuleType:
    """``torch.sim``: what torch asks the module of an accelerator. Its random numbers are the CPU's."""
    module: Any = types.ModuleType("torch.sim")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count, module.current_device = lambda: 2, torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.manual_seed_all = module.manual_seed = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.device = _Device
    module.Stream = lambda device="sim", priority=0: torch.Stream(device, priority=priority)
    module.Event = lambda **settings: torch.Event("sim", **settings)
    module.current_stream, module.stream = torch.accelerator.current_stream, contextlib.nullcontext
    module.synchronize = lambda device=None: torch.accelerator.synchronize(device)
    return module


class _Device:
    """``with torch.sim.device(1):``."""

    def __init__(self, device: Any) -> None:
        self.index = device if isinstance(device, int) else torch.device(device).index

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._before if self.index is None else self.index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


@dataclass
class Counted:
    """What a block has asked of the device.

    Attributes:
        launches: operations on it.
        reads: times that the host waited for a number, or for all of its work.
        copies: tensors that went from one device to another.
        names: of all of them, in order.
    """

    launches: int = 0
    reads: int = 0
    copies: int = 0
    names: list[str] = field(default_factory=list)


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    """Count what the block does."""
    device, found = start(), Counted()
    device.reset(True)
    try:
        yield found
    finally:
        found.launches, found.reads, found.copies, _ = device.counts()
        found.names = device.names()
        device.reset(False)


@contextlib.contextmanager
def failing_at(operation: int) -> Iterator[None]:
    """Let the n-th operation of the block (from 1) raise ``torch.OutOfMemoryError``."""
    start().fail_at(operation)
    try:
        yield
    finally:
        start().fail_at(0)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Let memory be nan before it is written to, and after it is freed; writing to freed memory is an error."""
    device = start()
    device.set_poison(True)
    try:
        yield
        assert not device.written_after_free(), "memory was written to after it had been freed"
    finally:
        device.set_poison(False)


def peak_of_memory(run: Callable[[], None]) -> int:
    """The bytes that ``run`` holds at most, beyond those before it."""
    device = start()
    before, _ = device.memory()  # and the peak begins anew
    run()
    return int(device.memory()[1] - before)


@contextlib.contextmanager
def autocast_list() -> Iterator[None]:
    """Give the device CUDA's list of casts, natively; without it, it has none."""
    start().set_autocast_list(True)
    try:
        yield
    finally:
        start().set_autocast_list(False)
