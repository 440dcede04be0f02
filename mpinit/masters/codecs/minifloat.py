"""State in 8 bits: a small floating-point code for each number, and one scale for each block.

A block is 128 numbers with a scale of its own, as in "8-bit Optimizers via Block-wise Quantization" (Dettmers et al.,
2022, arXiv:2110.02861). To encode a number, divide it by its scale and add 2. The code has the last bits of the
result's exponent and the first 3 bits of its fraction. In a block with a negative number these are 4 bits of the
exponent and the sign (E4M3). In a block without one, such as of second moments, they are 5 bits (E5M3): a step divides
by their root, so beside numbers that are 1000 times as small as others there are second moments 1,000,000 times as
small. There no number above 0 becomes 0.

Numbers are rounded stochastically, see :mod:`.bfloat16`: noise is added to the bits that are cut off. Between two codes
a float32 number is a linear function of its bits, so this is right on average.
"""

from typing import Final, final

import torch

from ..arithmetic import EAGER, Arithmetic, Sample
from .codec import BLOCK, Codec, Codes, sample_noise, sample_numbers

# Added to a number over its scale: what is small beside it is kept in even steps. With its bits code 0 begins.
_LEAST: Final = 2
_LEAST_BITS: Final = 0x40000000
# Bits that are cut off; the largest number over its scale, of blocks without a sign and of those with one.
_CUT_OFF: Final = 20
_LARGEST: Final = (15.0 * 2**29, 15.0 * 2**13 - _LEAST)
_TINY: Final = torch.finfo(torch.float32).tiny
# The last four of a scale's 24 bits are 0. So encoding the decoded numbers again computes the same scale.
_SHORT: Final = 16
# Noise keeps so far from both ends of what is cut off, so that errors in the last places lead to the same code.
_MARGIN: Final = 64
_KEPT: Final = 2**_CUT_OFF - 2 * _MARGIN


@final
class Minifloat(Codec):
    """``optimizer_state="int8"``: 1 byte a number and 4 for each block of 128.

    The error is below 1/8 of a number and 2**-18 of its block's largest (2**-34 in blocks without negative numbers); on
    average there is none, and the largest itself has none above 2**-19. A block with inf or nan comes back as inf and
    nan throughout.

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

    def _encode(
        self, values: torch.Tensor, codes: Codes, noise: torch.Tensor, places: torch.Tensor, run: Arithmetic
    ) -> None:
        whole, scales = codes
        inverses, ends = torch.empty_like(scales), torch.empty(len(scales), 2, dtype=torch.int32, device=scales.device)
        bits = values.view(torch.int32)  # faster than a view inside of a compiled function
        run(_measure, values, bits, scales, inverses, ends)
        run(_round, values, bits, inverses, ends, noise, places, whole)

    def decode_(self, codes: Codes, values: torch.Tensor, run: Arithmetic = EAGER) -> None:
        run(_decode, *codes, values)

    def samples(self) -> list[Sample]:
        values, (noise, places) = sample_numbers(), sample_noise()
        bits = values.view(torch.int32)
        codes, scales = self.empty(len(values), values.device)
        inverses, ends = torch.empty_like(scales), torch.empty(len(values), 2, dtype=torch.int32, device="cpu")
        _measure(values, bits, scales, inverses, ends)
        _round(values, bits, inverses, ends, noise, places, codes)
        return [
            Sample(_measure, [values, bits, scales, inverses, ends], [2, 3, 4]),
            Sample(_round, [values, bits, inverses, ends, noise, places, torch.empty_like(codes)], [6]),
            Sample(_decode, [codes, scales, torch.empty_like(values)], [2]),
        ]


# Two functions, because a compiler would compute what is the same for a row again for every few numbers of it.


def _measure(
    values: torch.Tensor, bits: torch.Tensor, scales: torch.Tensor, inverses: torch.Tensor, ends: torch.Tensor
) -> None:
    """Find each block's scale, its inverse, and the least code of a number above 0 with the bits set in each code."""
    # Compare the bits, so that -0.0 is negative; and as floating-point numbers: compilers have slow maxima of others.
    unsigned = (bits < 0).to(torch.float32).amax(1, keepdim=True) == 0
    without_sign, with_sign = (values.new_full((), each) for each in _LARGEST)
    largest = torch.where(unsigned, without_sign, with_sign)
    exact = (values.abs().amax(1, keepdim=True) / largest).clamp_(min=_TINY)
    short = (exact.view(torch.int32) + _SHORT // 2).bitwise_and_(-_SHORT).view(torch.float32)
    finite = exact.isfinite()
    scale = torch.where(finite, short, exact)
    scales.copy_(torch.where(unsigned, -scale, scale))
    inverses.copy_(scale.reciprocal())
    ends.copy_(torch.cat([unsigned.to(torch.int32), finite.logical_not().to(torch.int32) * 255], 1))


def _round(
    values: torch.Tensor,
    bits: torch.Tensor,
    inverses: torch.Tensor,
    ends: torch.Tensor,
    noise: torch.Tensor,
    places: torch.Tensor,
    codes: torch.Tensor,
) -> None:
    """Round numbers over their scale."""
    size = values.abs()
    # In place where it can be: fresh memory costs more than what is done in it.
    whole = (size * inverses).add_(_LEAST).view(torch.int32)
    random = (places * noise).bitwise_and_(_KEPT).bitwise_or_(_MARGIN)
    whole.add_(random).bitwise_right_shift_(_CUT_OFF)
    # A negative number has 255 - n, and a -0.0 a code of its own: without it a block might lose its sign.
    whole.bitwise_xor_(bits >> 31).bitwise_and_(255)
    least = torch.minimum(size.view(torch.int32), ends[:, :1])
    codes.copy_(torch.maximum(whole, least).bitwise_or_(ends[:, 1:]))


def _decode(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    """Put the bits that were cut off back as zeros, and scale."""
    whole = values.view(torch.int32).copy_(codes)
    # All bits are 1 where the number is negative: shifting left by 24 puts a code's first bit, its sign, in front.
    sign = torch.bitwise_left_shift(whole, torch.where(torch.signbit(scales), 0, 24).to(torch.int32))
    sign.bitwise_right_shift_(31)
    whole.bitwise_xor_(sign).bitwise_and_(255).bitwise_left_shift_(_CUT_OFF).add_(_LEAST_BITS)
    values.sub_(_LEAST).mul_(scales.abs()).copysign_(sign.view(torch.float32))
