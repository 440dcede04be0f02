"""The device that a session's tests put their models and data on: the CPU, or what ``pytest --device`` named."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import simulated_device
import torch

_CHOSEN: Final[dict[str, torch.device]] = {"device": torch.device("cpu")}


def choose(name: str) -> None:
    """Let the session's device be this one, and be there."""
    if name == "sim":
        if why := simulated_device.missing():
            pytest.exit(why, 0)
        simulated_device.start()
    _CHOSEN["device"] = torch.device(name)


def device() -> torch.device:
    """The session's device."""
    return _CHOSEN["device"]


def placed(thing: Any) -> Any:
    """A model, a tensor, or a list or tuple of them on the session's device."""
    if isinstance(thing, (list, tuple)):
        return type(thing)(map(placed, thing))
    if device().type == "cpu":
        return thing
    # Devices of their own get new parameters, a shared one several times, unless they are swapped in place.
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return thing.to(device())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Fail where the block waits for the session's device; on the CPU, which nothing waits for, never."""
    if device().type == "sim":
        with simulated_device.counted() as found:
            yield
        assert found.reads == 0, [name for name in found.names if name.startswith("read")]
    elif device().type == "cuda":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        yield


def peak_of_memory(run: Callable[[], None]) -> int:
    """The bytes of an accelerator that ``run`` holds at most, beyond those before it."""
    if device().type == "sim":
        return simulated_device.peak_of_memory(run)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - base
