"""What an encoding can do: float32 numbers of any length in, a few tensors of codes out, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import torch

Codes = tuple[torch.Tensor, ...]

# Elements worked on at a time on a CPU, so that several passes over them stay in its cache; a multiple of every block.
_CHUNK: Final = 1 << 16


class Codec(ABC):
    """An encoding of one-dimensional float32 tensors.

    What was decoded and not changed is encoded to the same codes: writing back without a step changes nothing, and an
    optimizer's float32 state dict loses nothing.

    Attributes:
        name: what ``optimizer_state`` calls it.
    """

    name: str

    @abstractmethod
    def empty(self, length: int, device: torch.device) -> Codes:
        """Room for the codes of ``length`` numbers."""

    @abstractmethod
    def encode_(self, values: torch.Tensor, codes: Codes) -> None:
        """Write the codes of ``values`` (float32, contiguous)."""

    @abstractmethod
    def decode_(self, codes: Codes, values: torch.Tensor) -> None:
        """Write what codes stand for into ``values`` (float32, contiguous)."""


def chunks(values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of a one-dimensional tensor with where they begin, small enough for temporaries not to count."""
    size = _CHUNK if values.device.type == "cpu" else 64 * _CHUNK
    for start in range(0, values.numel(), size):
        yield start, values[start : start + size]


def noise(bits: torch.Tensor) -> torch.Tensor:
    """Whole numbers, evenly spread over all 32 bits and best in the upper ones, for float32 numbers seen as int32.

    Made of the numbers themselves, their places and a sum over all of them: no generator of random numbers is
    touched, the same numbers give the same noise again after a resume, and as soon as one number has changed the noise
    of all others is another, so that none gets stuck.

    Example:
        >>> bits = torch.zeros(1000, dtype=torch.int32)
        >>> (noise(bits) > 0).float().mean().round(decimals=1).item()
        0.5
    """
    # A factor, because a sum would move all noise by the same amount: equal numbers then end in a pattern that stays.
    seed = bits.sum(dtype=torch.int32).mul_(_STIR).bitwise_or_(1)
    places = torch.arange(1, bits.numel() + 1, dtype=torch.int32, device=bits.device)
    return places.mul_(seed).add_(bits).mul_(_GOLDEN)


# Odd numbers without pattern; the second is 2**32 over the golden ratio, whose multiples are spread most evenly.
_STIR: Final = 0x27D4EB2F
_GOLDEN: Final = 0x9E3779B1 - 2**32
