"""Numbers of a tensor that a person looks at, and small samples by which two tensors are compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..basics.dtypes import dtype_name

# Elements kept of a tensor that is going to be compared: enough to tell two tensors apart by their norms.
SAMPLE: Final = 4096


@dataclass(frozen=True)
class TensorStats:
    """What a tensor held.

    Attributes:
        dtype, shape: the tensor's.
        low, high: the smallest and the largest finite number; both 0.0 where there is none.
        largest: the largest finite magnitude.
        nonfinite: how many elements were inf or nan.
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
    """The statistics of a dense floating tensor; waits for its device.

    Example:
        >>> print(stats_of(torch.tensor([1.0, -3.0, float("inf")])))
        float32 3 from -3 to 1, 1 of them inf or nan
    """
    values = tensor.detach().float()
    finite = torch.isfinite(values)
    kept = values[finite]
    low, high = (float(kept.min()), float(kept.max())) if kept.numel() else (0.0, 0.0)
    bad = values.numel() - kept.numel()
    return TensorStats(tensor.dtype, tuple(tensor.shape), low, high, max(abs(low), abs(high)), bad)


def floating_tensors(tree: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The dense floating tensors with numbers in arguments or results: alone, or in tuples, lists, dicts and objects.

    Example:
        >>> [t.shape[0] for t in floating_tensors((torch.ones(1), {"a": [torch.ones(2), 3]}))]
        [1, 2]
    """
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point() and tree.layout is torch.strided and not tree.is_meta and tree.numel():
            yield tree
    elif depth > 0 and isinstance(tree, (tuple, list)):
        for item in tree:
            yield from floating_tensors(item, depth - 1)
    elif depth > 0 and isinstance(tree, dict):
        for item in tree.values():
            yield from floating_tensors(item, depth - 1)
    elif depth > 0 and hasattr(tree, "__dataclass_fields__"):
        for item in vars(tree).values():
            yield from floating_tensors(item, depth - 1)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a floating tensor holds neither inf nor nan."""
    # A sum is a third of the work of looking at each element; only where it is bad do the elements count.
    if tensor.dtype in (torch.float32, torch.float64) and bool(torch.isfinite(tensor.sum())):
        return True
    return bool(torch.isfinite(tensor).all())


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Up to about ``SAMPLE`` elements of a tensor, evenly spread, in float32 and in memory of their own."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLE)
    return flat[::step].to(torch.float32, copy=True)


def error_of(given: torch.Tensor, reference: torch.Tensor) -> float:
    """The norm of the difference over the norm of the reference; inf where ``given`` is not finite but that is.

    Example:
        >>> error_of(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0]))
        0.08...
    """
    if given.shape != reference.shape:
        return float("inf")
    given, reference = given.double(), reference.double()
    both = torch.isfinite(reference)
    if not bool(torch.isfinite(given[both]).all()):
        return float("inf")
    given, reference = given[both], reference[both]
    norm = float(reference.norm())
    difference = float((given - reference).norm())
    return difference / norm if norm > 0 else (0.0 if difference == 0 else float("inf"))
