"""dtype names and predicates: the one place that knows how a user may spell a dtype."""

from __future__ import annotations

from typing import Any, Final

import torch

LOWER_PRECISION: Final = (torch.float16, torch.bfloat16)

_NAMES: Final[dict[str, torch.dtype]] = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
}


def parse_dtype(value: Any) -> torch.dtype:
    """Turn a user's spelling of a dtype into a ``torch.dtype``.

    Args:
        value: a ``torch.dtype``, or one of "float16", "fp16", "half", "bfloat16", "bf16", "float32", "fp32",
            "float", with or without a leading "torch.".

    Returns:
        ``torch.float16``, ``torch.bfloat16`` or ``torch.float32``.

    Raises:
        ValueError: for anything else, naming what is allowed.

    Example:
        >>> parse_dtype("bf16")
        torch.bfloat16
    """
    if isinstance(value, torch.dtype) and value in _NAMES.values():
        return value
    if isinstance(value, str):
        found = _NAMES.get(value.strip().lower().removeprefix("torch."))
        if found is not None:
            return found
    raise ValueError(f"{value!r} is not a dtype mpinit works in; give a torch.dtype or one of {', '.join(_NAMES)}")


def dtype_name(dtype: torch.dtype) -> str:
    """The bare name of a dtype, "float16" for ``torch.float16``: what configuration files and JSON hold."""
    return str(dtype).removeprefix("torch.")


def is_lower_precision(dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is one of the two 16-bit floating types."""
    return dtype in LOWER_PRECISION
