"""How a process that runs tests is set up, a child of one too."""

import functools
import gc
import os

import torch


def prepare() -> None:
    """One thread, rare looks for garbage, no seeds for devices that are not there, kernels that compile soon."""
    torch.set_num_threads(1)
    # torch makes its pool of threads anew in a forked process: here, where no two threads can find it half made.
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
    # The heap of a compiler is large: looking through all of it for garbage takes a second, and is rarely needed.
    gc.set_threshold(10_000, 20, 50)
    # Where there is no such device, seeding it keeps a text of the whole stack for the day that there is one: 3 ms of
    # every torch.manual_seed under pytest.
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = _no_device  # type: ignore[attr-defined]
    # Inductor, which is not imported yet, compiles kernels without vector instructions: to find out which of these
    # there are takes it 11 s of a compiler. It does so in this process: another one would have to import torch first.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def keep() -> None:
    """What there is by now stays to the end: it is not looked through for garbage, or for wrappers of a model."""
    gc.collect()
    gc.freeze()


def _no_device(seed: int) -> None:
    pass
