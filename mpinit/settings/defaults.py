"""What holds where a caller says nothing, and how that is told from the same said aloud."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

DEFAULT_INIT_SCALE: Final = 2.0**16
DEFAULT_MAX_SCALE: Final = 2.0**24

T = TypeVar("T")
Config = str | Path | Mapping[str, Any] | None


class Default:
    """Marks a value as not chosen by the caller, so that a configuration's may stand in for it, equal or not."""

    __slots__ = ()


def _unsaid(value: T) -> T:
    """``value``, in a class of its own that is a :class:`Default` besides."""
    marked: T = type("_Default", (type(value), Default), {"__slots__": ()})(value)
    return marked


DEFAULT_LEVEL: Final = _unsaid("O1")
DEFAULT_ONE: Final = _unsaid(1)
DEFAULT_LIMIT: Final = _unsaid(DEFAULT_MAX_SCALE)
