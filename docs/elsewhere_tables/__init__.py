"""The tables of docs/reference/sixteen-bits-elsewhere.md: what is run for each row.

These files import only Python itself at their top: the runner reads them without torch, and a row's packages are
installed in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

TIMM: Final = "timm==1.0.31 torchvision==0.28.0"
_libraries: Final[list[Any]] = []


@dataclass(frozen=True)
class Row:
    """One row: its packages, pinned and separated by spaces, and the function that measures its cells."""

    packages: str
    measure: Callable[[], Mapping[str, str]]
    torch: bool = True


@dataclass(frozen=True)
class Table:
    """A section of the page: its text, the columns after the names, and its rows."""

    title: str
    text: str
    columns: tuple[str, ...]
    rows: Mapping[str, Row]


def cell(measured: Callable[[], object]) -> str:
    """Return what a function returns, as text of five digits, or the error that it raises."""
    try:
        value = measured()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}"[:140]
    return value if isinstance(value, str) else f"{float(value):.5g}"  # type: ignore[arg-type]


def import_timm() -> Any:
    """Import timm, also where torchvision is built for CUDA and torch for the CPU, so its operators do not load."""
    import torch

    try:
        import torchvision  # noqa: F401
    except (RuntimeError, AttributeError):
        _libraries.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _libraries[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm
    import timm.layers
    import timm.optim
    import timm.utils

    return timm
