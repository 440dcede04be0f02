"""What an encoding can do: blocks of float32 numbers in, a few tensors of codes out, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch

Codes = tuple[torch.Tensor, ...]

# Numbers that are encoded together, and a row of everything here: the last row of a tensor is filled up with zeros.
BLOCK: Final = 128


class Codec(ABC):
    """An encoding of rows of :data:`BLOCK` float32 numbers.

    What was decoded and not changed is encoded to the same codes: writing back without a step changes nothing, and an
    optimizer's float32 state dict loses nothing.

    Attributes:
        name: what ``optimizer_state`` calls it.
    """

    name: str

    @abstractmethod
    def empty(self, rows: int, device: torch.device) -> Codes:
        """Room for the codes of so many rows, each tensor with as many rows itself."""

    @abstractmethod
    def encode_(self, values: torch.Tensor, codes: Codes, rows: Sequence[int]) -> None:
        """Write the codes of ``values``.

        Args:
            values: float32 (rows, BLOCK), contiguous, of several tensors one after the other.
            codes: written to.
            rows: how many of them belong to each tensor; the codes of one don't depend on its neighbours.
        """

    @abstractmethod
    def decode_(self, codes: Codes, values: torch.Tensor) -> None:
        """Write what codes stand for into ``values`` (float32, (rows, BLOCK), contiguous)."""


def rows_for(length: int) -> int:
    """Rows that so many numbers take.

    Example:
        >>> rows_for(128), rows_for(129)
        (1, 2)
    """
    return -(-length // BLOCK)


def in_rows(values: torch.Tensor) -> torch.Tensor:
    """A one-dimensional float32 tensor as whole rows, a copy with zeros at the end where it is none."""
    missing = -values.numel() % BLOCK
    if missing:
        values = torch.cat([values, values.new_zeros(missing)])
    return values.view(-1, BLOCK)


# -- noise ------------------------------------------------------------------------------------------------------------
#
# Whole numbers, evenly spread over all 32 bits and best in the upper ones, made of the numbers themselves, their places
# and a sum over their tensor: no generator of random numbers is touched, the same numbers give the same noise again
# after a resume, and as soon as one number has changed the noise of all others is another, so that none gets stuck.


def low_halves(bits: torch.Tensor) -> torch.Tensor:
    """For each row the sum over the lower halves of float32 bits, exact in float32 in any order."""
    return bits.bitwise_and(0xFFFF).to(torch.float32).sum(1, keepdim=True)


def seeds(sums: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row its tensor's factor and its own summand, both int32 (rows, 1), from :func:`low_halves`."""
    whole = sums.to(torch.int32)
    parts = [part.sum(dtype=torch.int32) for part in whole.split_with_sizes(list(rows))]
    counts = torch.tensor(rows, device=sums.device)
    # A factor, because a sum would move all noise by the same amount: equal numbers then end in a pattern that stays.
    factors = torch.stack(parts).mul_(_STIR).bitwise_or_(1)
    places = torch.arange(len(sums), dtype=torch.int32, device=sums.device)
    if len(rows) > 1:
        places -= (counts.cumsum(0) - counts).to(torch.int32).repeat_interleave(counts)
        factor = factors.repeat_interleave(counts).view(-1, 1)
    else:
        factor = factors.expand(len(sums)).contiguous().view(-1, 1)
    return factor, places.mul_(BLOCK).view(-1, 1) * factor


def noise(bits: torch.Tensor, factor: torch.Tensor, summand: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The noise of float32 numbers seen as int32.

    Args:
        bits: the numbers, (rows, BLOCK).
        factor: of :func:`seeds`.
        summand: of :func:`seeds`.
        places: 1 to BLOCK, int32.

    Example:
        >>> bits = torch.zeros(100, BLOCK, dtype=torch.int32)
        >>> random = noise(bits, *seeds(low_halves(bits), [100]), places_in_a_row(bits.device))
        >>> (random > 0).float().mean().round(decimals=1).item()
        0.5
    """
    return (places * factor + summand + bits) * _GOLDEN


def places_in_a_row(device: torch.device) -> torch.Tensor:
    """1 to BLOCK."""
    return torch.arange(1, BLOCK + 1, dtype=torch.int32, device=device)


# Odd numbers without pattern; the second is 2**32 over the golden ratio, whose multiples are spread most evenly.
_STIR: Final = 0x27D4EB2F
_GOLDEN: Final = 0x9E3779B1 - 2**32
