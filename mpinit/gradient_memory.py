"""Memory of large float32 gradients on a CPU, given back late so that the next ones find it.

A C library returns a large block to the system as soon as nothing above it is in use, and the next one is faulted in
again page by page: for the gradients of 40 M parameters that was measured to take as long as a whole Adam step. An old
gradient that is let go only when its successor has arrived leaves its block to the weight that comes next in backward.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .sharding import is_sharded

_SMALL: Final = 2**15  # elements: 128 KiB, up to which a C library serves memory without asking the system


def wants_memory(weight: torch.Tensor) -> bool:
    """Whether fresh memory for this weight's gradient costs more than filling it."""
    return weight.device.type == "cpu" and weight.numel() > _SMALL and not is_sharded(weight)


class GradientMemory:
    """Holds a weight's last gradient until the next one has arrived.

    Args:
        weight: a leaf.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> memory = GradientMemory(weight)
        >>> weight.sum().backward()
        >>> weight.grad = None
        >>> memory.gradient
        tensor([1., 1.])
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.gradient: torch.Tensor | None = None
        self._hook: Any = weight.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def _arrived(self, weight: torch.Tensor) -> None:
        self.gradient = weight.grad

    def close(self) -> None:
        """Let the gradient go, and watch no longer."""
        self.gradient = None
        self._hook.remove()
