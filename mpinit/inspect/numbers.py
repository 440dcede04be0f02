"""Tensors in nested containers, and their statistics."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..basics.dtypes import dtype_name
from ..basics.trees import tensors_in


@dataclass(frozen=True)
class TensorStats:
    """The statistics of a tensor.

    Attributes:
        dtype, shape: the tensor's.
        low, high: the smallest and the largest finite number; both 0.0 if no number is finite.
        largest: the largest finite magnitude.
        nonfinite: the number of elements that are inf or nan.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float
    high: float
    largest: float
    nonfinite: int

    def __str__(self) -> str:
        bad = f", {self.nonfinite} of them inf or nan" if self.nonfinite else ""
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{dtype_name(self.dtype)} {shape} from {self.low:.4g} to {self.high:.4g}{bad}"


def stats_of(tensor: torch.Tensor) -> TensorStats:
    """Compute the statistics of a dense floating tensor; this needs a device sync."""
    values = tensor.detach().float()
    finite = torch.isfinite(values)
    kept = values[finite]
    low, high = (float(kept.min()), float(kept.max())) if kept.numel() else (0.0, 0.0)
    bad = values.numel() - kept.numel()
    return TensorStats(tensor.dtype, tuple(tensor.shape), low, high, max(abs(low), abs(high)), bad)


def floating_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results that are floating and dense, and are not on the meta device."""
    for tensor in tensors_in(tree):
        if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            yield tensor


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a floating tensor has neither inf nor nan."""
    # A sum is a third of the work of checking each element. It may overflow, so the elements decide then.
    if tensor.dtype in (torch.float32, torch.float64) and bool(torch.isfinite(tensor.sum())):
        return True
    return bool(torch.isfinite(tensor).all())
