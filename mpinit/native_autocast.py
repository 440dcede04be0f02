"""The native autocast flag: which devices have one, and how to switch it off and back, cheaply.

The flag is the one truth for "casts are on": there is no flag of mpinit's own. It is kept per thread and per
device type by torch.
"""

from __future__ import annotations

import functools
from types import TracebackType

import torch


@functools.cache
def device_types() -> tuple[str, ...]:
    """The device types present in this process that have an autocast flag, "cpu" first."""
    found = ["cpu"]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.amp.is_autocast_available(accelerator.type):
        found.append(accelerator.type)
    return tuple(found)


def is_on() -> bool:
    """Whether casts are on in this thread for any device present."""
    return any(torch.is_autocast_enabled(device) for device in device_types())


class CastsOff:
    """Switches every autocast flag of this thread off inside the block and back on exit, whatever they were.

    Example:
        >>> with CastsOff():
        ...     torch.is_autocast_enabled("cpu")
        False
    """

    __slots__ = ("_were_on",)

    def __init__(self) -> None:
        self._were_on: list[tuple[str, ...]] = []

    def __enter__(self) -> CastsOff:
        were_on = tuple(device for device in device_types() if torch.is_autocast_enabled(device))
        self._were_on.append(were_on)
        for device in were_on:
            torch.set_autocast_enabled(device, False)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for device in self._were_on.pop():
            torch.set_autocast_enabled(device, True)


class CastsAs:
    """Puts every autocast flag of this thread to a remembered state inside the block and back on exit."""

    __slots__ = ("_before", "_state")

    def __init__(self, state: dict[str, bool]) -> None:
        self._state = state
        self._before: list[dict[str, bool]] = []

    def __enter__(self) -> CastsAs:
        self._before.append(flags())
        set_flags(self._state)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        set_flags(self._before.pop())


def flags() -> dict[str, bool]:
    """This thread's autocast flag for each device type present."""
    return {device: torch.is_autocast_enabled(device) for device in device_types()}


def set_flags(state: dict[str, bool]) -> None:
    """Set this thread's autocast flags to a state that :func:`flags` returned."""
    for device, on in state.items():
        torch.set_autocast_enabled(device, on)
