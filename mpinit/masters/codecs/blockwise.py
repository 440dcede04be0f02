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

from typing import Any, Final, final

import torch

from ...torch_internals.compiled_kernel import CompiledKernel
from ...torch_internals.devices import is_read_freely
from .codec import BLOCK, Codec, Codes, factors_of, noise, places_in_a_row

# The largest n of blocks without a sign, and of those with one.
_LARGEST: Final = (255.0, 127.0)
_TINY: Final = torch.finfo(torch.float32).tiny
# Of a scale's 24 bits the last four are 0: made again of the largest number decoded, it is the same.
_CUT: Final = 16
# Rows that share noise: all numbers of one alone may happen to stay what they are, and then would for ever.
_NEIGHBOURS: Final = 32
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
        >>> codec.encode_(values, codes); codec.decode_(codes, values); values[0, :2].round(decimals=3).tolist()
        [-2.0, 0.0]
    """

    name = "int8"

    def empty(self, rows: int, device: torch.device) -> Codes:
        """Codes (uint8), and each block's scale (float32), negative where the block has no sign."""
        return (
            torch.empty(rows, BLOCK, dtype=torch.uint8, device=device),
            torch.empty(rows, 1, dtype=torch.float32, device=device),
        )

    def encode_by(self, native: Any | None, values: torch.Tensor, codes: Codes) -> None:
        """Find each block's scale, and round."""
        if native is not None:
            native.encode(values, *codes)
        else:
            factors = factors_of(values.view(torch.int32), _NEIGHBOURS)
            _ENCODE(values, factors, *codes, places_in_a_row(values.device))

    def decode_by(self, native: Any | None, codes: Codes, values: torch.Tensor) -> None:
        """Square, and scale."""
        if native is not None:
            native.decode(*codes, values)
        else:
            _DECODE(*codes, values)


def _scales(largest: torch.Tensor, unsigned: torch.Tensor) -> torch.Tensor:
    steps = torch.where(unsigned, *_LARGEST)
    exact = (largest / (steps * steps)).clamp(min=_TINY)
    cut = (exact.view(torch.int32) + _CUT // 2).bitwise_and(-_CUT).view(torch.float32)
    return torch.where(exact.isfinite(), cut, exact)


def _encode(
    values: torch.Tensor, factors: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, places: torch.Tensor
) -> None:
    assert values.shape[1] == BLOCK
    bits, size = values.view(torch.int32), values.abs()
    # Of the bits, so that a -0.0 is negative.
    unsigned = bits.amin(1, keepdim=True) >= 0
    scale = _scales(size.amax(1, keepdim=True), unsigned)
    scales.copy_(torch.where(unsigned, -scale, scale))
    # In place where it can be: fresh memory costs more than what is done in it.
    square = size * scale.reciprocal()
    low = square.sqrt().floor_()
    square.addcmul_(low, low, value=-1)
    random = noise(bits, factors, places).bitwise_right_shift_(9)
    # Twice the chance of n being the lower one, times (low + 1/2), is compared with what was cut off the square.
    chance = random.to(torch.float32).mul_(2 * _SPREAD).add_(1).mul_(low + 0.5)
    n = low.add_(square.gt_(chance))
    has_unsigned, has_signed = _has(unsigned), _has(~unsigned)
    if has_unsigned:
        # At least 1 where there is no sign and the number is not 0.
        n = torch.maximum(n, size.mul_(1e38).clamp_(max=unsigned.float()), out=n)
    whole = random.copy_(n)
    if has_signed:
        # A negative number has 127 - n, and a -0.0 a code of its own: without it a block might lose its sign.
        negative = torch.bitwise_right_shift(bits, 31, out=chance.view(torch.int32))
        whole.bitwise_xor_(negative).add_(torch.where(unsigned, 0, 128))
    codes.copy_(whole)
    if _has(infinite := ~scale.isfinite()):
        codes.masked_fill_(infinite, 255)


def _decode(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    assert codes.shape[1] == BLOCK
    unsigned = torch.signbit(scales)
    n = values.copy_(codes)
    if _has(~unsigned):
        signed = n - torch.where(unsigned, 0.0, 127.5)
        n = torch.abs(signed, out=values).sub_(torch.where(unsigned, 0.0, 0.5))
        n.square_().mul_(scales.abs()).copysign_(signed)
    else:
        n.square_().mul_(scales.abs())


def _has(rows: torch.Tensor) -> bool:
    """Whether any of some rows is so, where asking costs no wait for a device; True elsewhere."""
    return not is_read_freely(rows.device) or bool(rows.any())


_ENCODE: Final = CompiledKernel(_encode)
_DECODE: Final = CompiledKernel(_decode)
