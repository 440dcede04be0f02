"""Memory of large gradients on a CPU, kept from going back to the system between steps.

A C library returns the free memory above the highest block in use to the system, and when it is needed again it is
faulted in page by page: for all gradients that was measured to take longer than an Adam step. One block kept in use
keeps everything below it: free for whoever asks next, activations too, and without faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

_SMALL: Final = 2**15  # elements: 128 KiB, up to which a C library serves memory from blocks of its own


class HighestGradient:
    """Keeps the gradient at the highest address of those whose memory may go back to the system.

    Args:
        weights: whose gradients are meant.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._large = large_on_cpu(weights)
        self._kept: torch.Tensor | None = None

    def keep(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep the highest of these; gradients cleared leave the last one kept where it is."""
        if self._large:
            kept = highest(gradients[index] for index in self._large)
            self._kept = self._kept if kept is None else kept


def large_on_cpu(weights: Sequence[torch.Tensor]) -> list[int]:
    """The indices of those whose gradients take memory that may go back to the system."""
    return [
        index
        for index, weight in enumerate(weights)
        if weight.numel() > _SMALL and weight.device.type == "cpu" and not hasattr(weight, "device_mesh")
    ]


def highest(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The dense gradient at the highest address, without its graph; None where there is none.

    Example:
        >>> one = torch.ones(2)
        >>> highest([None, one]).data_ptr() == one.data_ptr()
        True
    """
    dense = [gradient for gradient in gradients if gradient is not None and not gradient.is_sparse]
    return max(dense, key=torch.Tensor.data_ptr).detach() if dense else None


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors share a tensor's memory, counted in torch's own way: to be compared with a count from before."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
