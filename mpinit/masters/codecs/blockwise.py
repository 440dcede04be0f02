"""State in 8 bits: a code for each number, and one scale for each block.

A block is 128 numbers with a scale of its own, as in "8-bit Optimizers via Block-wise Quantization" (Dettmers et al.,
2022, arXiv:2110.02861). A number is its sign and a whole number n squared, times the scale: steps that are fine near
zero, where most numbers of a block are, without a table that is searched. A block with a negative number has n up to
127 and a sign; a block without, such as of second moments, n up to 255, and there no number above 0 becomes 0, by whose
root an update would be divided.

Numbers are rounded stochastically, see :mod:`.bfloat16`: to n or n + 1 in such proportion that the squares are right on
average. Rounded so before squaring, they would be too large on average, and an average of them grow without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import torch

from ...torch_internals.compiled_kernel import CompiledKernel
from .codec import BLOCK, Codec, Codes, low_halves, noise, places_in_a_row, seeds

# The largest n of blocks without a sign, and of those with one.
_LARGEST: Final = (255.0, 127.0)
_TINY: Final = torch.finfo(torch.float32).tiny
# Of a scale's 24 bits the last four are 0: made again of the largest number decoded, it is the same.
_CUT: Final = 16
# Chances are this far from 0 and 1, so that errors in the last place lead to the same code.
_SPREAD: Final = 2.0**-23 * (1 - 2.0**-11)


@final
class Blockwise(Codec):
    """``optimizer_state="int8"``: 1 byte a number and 4 a block.

    With y the number over the largest of its block, the error is below (2 sqrt(y) + 1/127) / 127 of the largest
    ((2 sqrt(y) + 1/255) / 255 in blocks without negative numbers); on average there is none, and the largest itself
    has none above 2**-19. A block with inf or nan comes back as inf and nan throughout.

    Example:
        >>> codec = Blockwise()
        >>> codes, values = codec.empty(1, torch.device("cpu")), torch.zeros(1, BLOCK)
        >>> values[0, 0] = -2.0
        >>> codec.encode_(values, codes, [1]); codec.decode_(codes, values); values[0, :2].round(decimals=3).tolist()
        [-2.0, 0.0]
    """

    name = "int8"

    def empty(self, rows: int, device: torch.device) -> Codes:
        """Codes (uint8), and each block's scale (float32), negative where the block has no sign."""
        return (
            torch.empty(rows, BLOCK, dtype=torch.uint8, device=device),
            torch.empty(rows, 1, dtype=torch.float32, device=device),
        )

    def encode_(self, values: torch.Tensor, codes: Codes, rows: Sequence[int]) -> None:
        """Find each block's scale, and round."""
        bits = values.view(torch.int32)
        largest, smallest, sums = (torch.empty(len(values), 1, device=values.device) for _ in range(3))
        _MEASURE(values, bits, largest, smallest, sums)
        unsigned = smallest >= 0
        scales = _scales(largest, unsigned)
        offset = torch.where(unsigned, 0.0, 128.0)
        factor, summand = seeds(sums, rows)
        places = places_in_a_row(values.device)
        _ENCODE(values, bits, scales.reciprocal(), offset, unsigned.float(), factor, summand, codes[0], places)
        codes[1].copy_(torch.where(unsigned, -scales, scales))

    def decode_(self, codes: Codes, values: torch.Tensor) -> None:
        """Square, and scale."""
        unsigned = torch.signbit(codes[1])
        _DECODE(codes[0], codes[1].abs(), *_middle(unsigned), values)


def _scales(largest: torch.Tensor, unsigned: torch.Tensor) -> torch.Tensor:
    steps = torch.where(unsigned, *_LARGEST)
    exact = (largest / (steps * steps)).clamp(min=_TINY)
    cut = (exact.view(torch.int32) + _CUT // 2).bitwise_and(-_CUT).view(torch.float32)
    return torch.where(exact.isfinite(), cut, exact)


def _middle(unsigned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What lies between the codes of positive and negative numbers, and how far from 0."""
    return torch.where(unsigned, 0.0, 127.5), torch.where(unsigned, 0.0, 0.5)


def _measure(
    values: torch.Tensor, bits: torch.Tensor, largest: torch.Tensor, smallest: torch.Tensor, sums: torch.Tensor
) -> None:
    assert values.shape[1] == BLOCK
    largest.copy_(values.abs().amax(1, keepdim=True))
    # Of the bits, so that a -0.0 is negative.
    smallest.copy_(bits.to(torch.float32).amin(1, keepdim=True))
    sums.copy_(low_halves(bits))


def _encode(
    values: torch.Tensor,
    bits: torch.Tensor,
    inverse: torch.Tensor,
    offset: torch.Tensor,
    lowest: torch.Tensor,
    factor: torch.Tensor,
    summand: torch.Tensor,
    codes: torch.Tensor,
    places: torch.Tensor,
) -> None:
    assert values.shape[1] == BLOCK
    size = values.abs()
    square = size * inverse
    low = square.sqrt().floor()
    chance = noise(bits, factor, summand, places).bitwise_right_shift(9).to(torch.float32) * _SPREAD + 0.5
    n = torch.where(chance * (low + low + 1) < square - low * low, low + 1, low)
    # At least 1 where there is no sign and the number is not 0.
    n = torch.maximum(n, torch.minimum(size * 1e38, lowest))
    codes.copy_(torch.where(bits < 0, 127.0 - n, offset + n))


def _decode(
    codes: torch.Tensor, scales: torch.Tensor, offset: torch.Tensor, half: torch.Tensor, values: torch.Tensor
) -> None:
    assert codes.shape[1] == BLOCK
    # A negative number has 127 - n, and a -0.0 a code of its own: without it a block might lose its sign.
    signed = codes.to(torch.float32) - offset
    n = signed.abs() - half
    values.copy_(torch.copysign(n * n * scales, signed))


def _sample_values() -> torch.Tensor:
    values = torch.linspace(-3, 3, 200 * BLOCK).pow(7).view(-1, BLOCK)
    values[::3].square_()
    values[1::7, ::5] = 0
    return values


def _sample_measured() -> list[torch.Tensor]:
    values = _sample_values()
    return [values, values.view(torch.int32), *(torch.empty(200, 1) for _ in range(3))]


def _sample_encoded() -> list[torch.Tensor]:
    values, bits, largest, smallest, sums = _sample_measured()
    _measure(values, bits, largest, smallest, sums)
    unsigned = smallest >= 0
    inverse, offset = _scales(largest, unsigned).reciprocal(), torch.where(unsigned, 0.0, 128.0)
    codes = torch.zeros(200, BLOCK, dtype=torch.uint8)
    factors = seeds(sums, [len(values)])
    return [values, bits, inverse, offset, unsigned.float(), *factors, codes, places_in_a_row(bits.device)]


def _sample_decoded() -> list[torch.Tensor]:
    codes = torch.arange(200 * BLOCK).to(torch.uint8).view(-1, BLOCK)
    scales = torch.linspace(1e-9, 3, 200).view(-1, 1)
    return [codes, scales, *_middle(scales < 1), torch.empty(200, BLOCK)]


_MEASURE: Final = CompiledKernel(_measure, _sample_measured)
_ENCODE: Final = CompiledKernel(_encode, _sample_encoded)
_DECODE: Final = CompiledKernel(_decode, _sample_decoded)
