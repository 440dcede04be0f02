"""State in 8 bits: a small floating-point code for each number, and one scale for each block.

A block is 128 numbers with a scale of its own, as in "8-bit Optimizers via Block-wise Quantization" (Dettmers et al.,
2022, arXiv:2110.02861). To encode a number, divide it by its scale and add 2. The code has the last 4 bits of the
result's exponent and the first bits of its fraction. In a block with a negative number these are 3 bits and the sign
(E4M3). In a block without one, such as of second moments, they are 4 bits (E4M4). There no number above 0 becomes 0,
because updates are divided by its root.

Numbers are rounded stochastically, see :mod:`.bfloat16`: noise is added to the bits that are cut off. Between two codes
a float32 number is a linear function of its bits, so this is right on average.
"""

from typing import Final, final

import torch

from .codec import BLOCK, Codec, Codes, call_in_chunks, noise, noise_arguments

# Added to a number over its scale: what is small beside it is kept in even steps. With its bits code 0 begins.
_LEAST: Final = 2
_LEAST_BITS: Final = 0x40000000
# Bits that are cut off, of blocks without a sign and of those with one; the largest number over its scale. Whole
# numbers, as torch.where would make the default type of others.
_CUT_OFF: Final = (19, 20)
_LARGEST: Final = (31 * 2**12 - _LEAST, 15 * 2**13 - _LEAST)
_TINY: Final = torch.finfo(torch.float32).tiny
# The last four of a scale's 24 bits are 0. So encoding the decoded numbers again computes the same scale.
_SHORT: Final = 16
# Noise keeps so far from both ends of what is cut off, so that errors in the last places lead to the same code.
_MARGIN: Final = 64


@final
class Minifloat(Codec):
    """``optimizer_state="int8"``: 1 byte a number and 4 for each block of 128.

    The error is below 1/8 of a number and 2**-18 of its block's largest (1/16 and 2**-19 in blocks without negative
    numbers); on average there is none, and the largest itself has none above 2**-19. A block with inf or nan comes back
    as inf and nan throughout.

    Example:
        >>> codec = Minifloat()
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

    def encode_(self, values: torch.Tensor, codes: Codes, tensors: torch.Tensor | None = None) -> None:
        """Find each block's scale, and round."""
        call_in_chunks(_encode, values, *codes, *noise_arguments(values, tensors))

    def decode_(self, codes: Codes, values: torch.Tensor) -> None:
        """Put the bits that were cut off back as zeros, and scale."""
        call_in_chunks(_decode, *codes, values)


def _encode(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    numbers: torch.Tensor,
    groups: torch.Tensor,
    places: torch.Tensor,
) -> None:
    assert values.shape[1] == BLOCK
    bits, size = values.view(torch.int32), values.abs()
    # Compare the bits, so that -0.0 is negative.
    unsigned = bits.amin(1, keepdim=True) >= 0
    exact = (size.amax(1, keepdim=True) / torch.where(unsigned, *_LARGEST)).clamp_(min=_TINY)
    short = (exact.view(torch.int32) + _SHORT // 2).bitwise_and_(-_SHORT).view(torch.float32)
    finite = exact.isfinite()
    scale = torch.where(finite, short, exact)
    torch.where(unsigned, -scale, scale, out=scales)
    cut_off = torch.where(unsigned, *_CUT_OFF).to(torch.int32)
    # 1 where there is no sign and the number is not 0.
    least = torch.minimum(size.view(torch.int32), unsigned.to(torch.int32)).to(torch.uint8)
    # In place where it can be: fresh memory costs more than what is done in it.
    whole = size.mul_(scale.reciprocal_()).add_(_LEAST).view(torch.int32)
    kept = torch.bitwise_left_shift(1, cut_off).sub_(2 * _MARGIN)
    random = noise(bits, numbers, groups, places)
    whole.add_(random.bitwise_and_(kept).bitwise_or_(_MARGIN)).bitwise_right_shift_(cut_off)
    # A negative number has 255 - n, and a -0.0 a code of its own: without it a block might lose its sign.
    whole.bitwise_xor_(torch.bitwise_right_shift(bits, 31, out=random))
    torch.maximum(codes.copy_(whole), least, out=codes)
    codes.masked_fill_(~finite, 255)


def _decode(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    assert codes.shape[1] == BLOCK
    unsigned = torch.signbit(scales)
    whole = values.view(torch.int32).copy_(codes)
    # All bits are 1 where the number is negative.
    sign = torch.bitwise_left_shift(whole, torch.where(unsigned, 0, 24).to(torch.int32)).bitwise_right_shift_(31)
    whole.bitwise_xor_(sign).bitwise_and_(255)
    whole.bitwise_left_shift_(torch.where(unsigned, *_CUT_OFF).to(torch.int32)).add_(_LEAST_BITS)
    values.sub_(_LEAST).mul_(scales.abs()).copysign_(sign.view(torch.float32))
