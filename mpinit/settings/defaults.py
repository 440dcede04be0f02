"""What holds where a caller says nothing, and how that is told from the same said aloud."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

DEFAULT_INIT_SCALE: Final = 2.0**16
DEFAULT_MAX_SCALE: Final = 2.0**24

Config = str | Path | Mapping[str, Any] | None


class Default:
    """Marks a value as not chosen by the caller, so that a configuration's may stand in for it, equal or not."""

    __slots__ = ()


class _DefaultStr(str, Default):
    __slots__ = ()


class _DefaultInt(int, Default):
    __slots__ = ()


class _DefaultFloat(float, Default):
    __slots__ = ()


DEFAULT_LEVEL: Final = _DefaultStr("O1")
DEFAULT_ONE: Final = _DefaultInt(1)
DEFAULT_LIMIT: Final = _DefaultFloat(DEFAULT_MAX_SCALE)
