"""State in 8 bits: a code for each number, the largest number of each block as it is.

A block is 128 numbers. Divided by the largest of them they are kept in a dynamic code, finer for smaller numbers, as in
"8-bit Optimizers via Block-wise Quantization" (Dettmers et al., 2022, arXiv:2110.02861), with octaves in the places of
decades, so that bits are shifted and no table is searched: a number y between 0 and 2 is kept as the leading bits of
the float32 number y + c, c a small power of two. Steps are even below c, and from there on as many in each octave.

A block with a negative number has a sign, 8 octaves, 16 steps in each. A block without, such as of second moments, has
16 octaves, and no number above 0 becomes 0, by whose root an update would be divided. Numbers are rounded
stochastically, see :mod:`.bfloat16`.
"""

from __future__ import annotations

from typing import Final, final

import torch

from .codec import Codec, Codes, chunks, noise

BLOCK: Final = 128

# Octaves of blocks with a sign, and of those without.
_OCTAVES: Final = (8, 16)
_STEPS_AS_BITS: Final = 4
_MANTISSA: Final = 23
_SHIFT: Final = _MANTISSA - _STEPS_AS_BITS
# What is added before bits are cut off is a multiple of 32, so that errors of 16 units in the last place, made where a
# decoded number is divided by the largest again, lead to the same code.
_GUARD: Final = 16
_NOISE: Final = (1 << _SHIFT) - 2 * _GUARD


@final
class Blockwise(Codec):
    """``optimizer_state="int8"``: 1 byte a number and 4 a block.

    The error is below 1/16 of a number plus 2**-11 of the largest in its block (2**-19 in blocks without negative
    numbers); on average there is none, and the largest itself has none. A block with inf or nan comes back as inf and
    nan throughout.

    Example:
        >>> codec = Blockwise()
        >>> codes, values = codec.empty(2, torch.device("cpu")), torch.tensor([1.0, -0.0])
        >>> codec.encode_(values, codes); codec.decode_(codes, values); values
        tensor([1., -0.])
    """

    name = "int8"

    def empty(self, length: int, device: torch.device) -> Codes:
        """Codes (uint8), and each block's largest number (float32), negative where the block has no sign."""
        blocks = -(-length // BLOCK)
        return (
            torch.empty(length, dtype=torch.uint8, device=device),
            torch.empty(blocks, dtype=torch.float32, device=device),
        )

    def encode_(self, values: torch.Tensor, codes: Codes) -> None:
        """Block by block."""
        for start, part in chunks(values):
            length = len(part)
            blocks, largest = _encode(_whole_blocks(part))
            codes[0][start : start + length].copy_(blocks.view(-1)[:length])
            codes[1][start // BLOCK :][: len(largest)].copy_(largest)

    def decode_(self, codes: Codes, values: torch.Tensor) -> None:
        """Block by block."""
        for start, part in chunks(values):
            length = len(part)
            largest = codes[1][start // BLOCK :][: -(-length // BLOCK)]
            decoded = _decode(_whole_blocks(codes[0][start : start + length]), largest)
            part.copy_(decoded.view(-1)[:length])


def _whole_blocks(part: torch.Tensor) -> torch.Tensor:
    missing = -len(part) % BLOCK
    if missing:
        part = torch.cat([part, part.new_zeros(missing)])
    return part.view(-1, BLOCK)


def _offsets(unsigned: torch.Tensor) -> torch.Tensor:
    """For each block c, which is 2 by the number of octaves."""
    return torch.where(unsigned, 2.0 ** (1 - _OCTAVES[1]), 2.0 ** (1 - _OCTAVES[0]))


def _tops(offsets: torch.Tensor) -> torch.Tensor:
    """What the last code stands for."""
    return 2 - 2.0**-_STEPS_AS_BITS - offsets


def _encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = values.view(torch.int32)
    unsigned = bits.amin(1, keepdim=True) >= 0
    offsets = _offsets(unsigned)
    size = values.abs()
    largest = size.amax(1, keepdim=True)
    # No number above 0 becomes 0 where there is no sign.
    lowest = size > torch.where(unsigned, 0.0, torch.inf)
    scales = _tops(offsets) / largest.clamp(min=torch.finfo(torch.float32).tiny)
    shifted = size.mul_(scales).add_(offsets).view(torch.int32)
    rounding = noise(bits.view(-1)).view_as(bits).bitwise_right_shift_(32 - _SHIFT).bitwise_and_(_NOISE)
    shifted.sub_(offsets.view(torch.int32) - _GUARD).add_(rounding).bitwise_right_shift_(_SHIFT)
    shifted.bitwise_or_(bits.bitwise_right_shift(24).bitwise_and_(0x80))
    codes = torch.maximum(shifted.to(torch.uint8), lowest.view(torch.uint8))
    return codes, torch.where(unsigned, -largest, largest).view(-1)


def _decode(codes: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    unsigned = torch.signbit(largest).view(-1, 1)
    offsets = _offsets(unsigned)
    wide = codes.to(torch.int32)
    negative = wide.bitwise_and(torch.where(unsigned, 0, 0x80).to(torch.int32)).bitwise_left_shift_(24)
    bits = wide.bitwise_and_(torch.where(unsigned, 0xFF, 0x7F).to(torch.int32)).bitwise_left_shift_(_SHIFT)
    size = bits.add_(offsets.view(torch.int32)).view(torch.float32).sub_(offsets)
    # Divided, because only then the last code is 1 and the largest number itself again.
    size.div_(_tops(offsets)).mul_(largest.abs().view(-1, 1))
    return size.view(torch.int32).bitwise_or_(negative).view(torch.float32)
