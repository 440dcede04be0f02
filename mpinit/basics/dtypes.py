"""Names of dtypes, and casts between dtypes."""

from typing import Any, Final

import torch

LOWER_PRECISION: Final = (torch.float16, torch.bfloat16)

NAMES: Final[dict[str, torch.dtype]] = {
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

    Example:
        >>> parse_dtype("bf16")
        torch.bfloat16
    """
    if isinstance(value, torch.dtype) and value in NAMES.values():
        return value
    if isinstance(value, str):
        found = NAMES.get(value.strip().lower().removeprefix("torch."))
        if found is not None:
            return found
    raise ValueError(f"unsupported dtype {value!r}; use a torch.dtype or one of {', '.join(NAMES)}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in configuration files and JSON: "float16" for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def is_lower_precision(dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` is one of the two 16-bit floating types."""
    return dtype in LOWER_PRECISION


def may_overflow(source: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether finite values of ``source`` may overflow in ``dtype``."""
    return torch.finfo(source).max > torch.finfo(dtype).max


# (dtype of a tensor, dtype of its cast) -> the largest number of the latter; absent if no number can overflow. The dict
# is complete from the beginning, because torch.compile would recompile a forward after an entry was added.
_LARGEST: Final[dict[tuple[torch.dtype, torch.dtype], float]] = {
    (source, dtype): torch.finfo(dtype).max
    for source in (torch.float64, torch.float32, *LOWER_PRECISION)
    for dtype in (torch.float32, *LOWER_PRECISION)
    if may_overflow(source, dtype)
}


def cast_within_range(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``tensor.to(dtype)``; a finite number that would overflow becomes the largest of ``dtype``.

    No number is read, which would be a device sync on an accelerator.
    """
    largest = _LARGEST.get((tensor.dtype, dtype))
    if largest is None or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.to(dtype)
    # bfloat16 has no 65,504: a clamp in it would return 65,536.
    values = tensor.float() if is_lower_precision(tensor.dtype) else tensor
    # The second term restores inf and nan. For finite numbers it is too small to change the clamped number.
    return values.clamp(-largest, largest).add_(values, alpha=torch.finfo(values.dtype).tiny).to(dtype)


def as_float32(gradient: torch.Tensor) -> torch.Tensor:
    """Cast a gradient to float32; return one that is float32 as it is. Sparse ones are coalesced after the cast."""
    if gradient.dtype is not torch.float32:
        gradient = gradient.float()
    return gradient.coalesce() if gradient.is_sparse and not gradient.is_coalesced() else gradient
