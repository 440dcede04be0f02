"""Verbose mode: what was cast from what to what, logged when first seen and counted.

Nothing of this is on the hot path otherwise: in verbose mode functions get wrappers that look, in the other mode
they don't.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ..basics.dtypes import dtype_name
from ..basics.logs import log
from .cast_lists import Cast, CastRow
from .casters import found_dtypes, left_alone, widest

_counts: Counter[tuple[str, str, str]] = Counter()


def observer(row: CastRow, name: str, function: Callable[..., Any], devices: tuple[str, ...]) -> Callable[..., Any]:
    """Wrap a function so that the casts its arguments get, native ones included, are recorded.

    Args:
        row: what is done to the arguments.
        name: the dotted name, for the log.
        function: the function that does it, a native one or a wrapper.
        devices: all device types present.

    Returns:
        A function with the same signature.
    """

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        # Inside a graph there is nothing to count, and a log call would break the graph.
        if not torch.compiler.is_compiling() and not left_alone(kwargs):
            for device in devices:
                if torch.is_autocast_enabled(device):
                    _look(row, name, args, kwargs, device)
        return function(*args, **kwargs)

    return observed


def _look(row: CastRow, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> None:
    found: list[torch.dtype] = []
    found_dtypes((*(args[: row.arguments or None]), *kwargs.values()), device, found)
    target: torch.dtype | None = torch.float32
    if row.cast is Cast.LOWER_PRECISION:
        target = torch.get_autocast_dtype(device)
    elif row.cast in (Cast.PROMOTE, Cast.REFUSED):
        target = widest(found) if row.cast is Cast.PROMOTE else None
    for dtype in found:
        if target is not None and dtype is not target:
            _record(name, dtype, target)


def _record(name: str, given: torch.dtype, to: torch.dtype) -> None:
    """Count one cast; the first of its kind is logged."""
    cast = (name, dtype_name(given), dtype_name(to))
    _counts[cast] += 1
    if _counts[cast] == 1:
        log.debug("cast: %s from %s to %s", *cast)


def log_counts() -> None:
    """Log how often each cast was seen, and forget."""
    for (name, given, to), count in _counts.items():
        log.debug("casts: %s from %s to %s, %d times", name, given, to, count)
    _counts.clear()
