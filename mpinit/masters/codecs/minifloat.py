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

from collections.abc import Sequence
from typing import Final, final

import torch

from ..arithmetic import EAGER, Arithmetic, Sample
from .codec import BLOCK, Codec, Codes, low_sums, places, sample_noise, sample_numbers

# Added to a number over its scale: what is small beside it is kept in even steps. With its bits code 0 begins.
_LEAST: Final = 2
_LEAST_BITS: Final = 0x40000000
# Bits that are cut off; the largest number over its scale, of blocks without a sign and of those with one.
_CUT_OFF: Final = 20
_LARGEST: Final = (15.0 * 2**29, 15.0 * 2**13 - _LEAST)
_MAGNITUDE: Final = 0x7FFFFFFF
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

    def _measure(self, values: torch.Tensor, codes: Codes, run: Arithmetic) -> Sequence[torch.Tensor]:
        sums, inverses = torch.empty_like(codes[1]), torch.empty_like(codes[1])
        least, filled = (torch.empty_like(codes[1], dtype=torch.int32) for _ in range(2))
        run(_measure, values.view(torch.int32), codes[1], sums, inverses, least, filled)
        return sums, inverses, least, filled

    def _round(
        self, values: torch.Tensor, codes: Codes, noise: torch.Tensor, known: Sequence[torch.Tensor], run: Arithmetic
    ) -> None:
        run(_round, values, values.view(torch.int32), *known, noise, places(noise.device), codes[0])

    def _decode(self, codes: Codes, values: torch.Tensor, run: Arithmetic) -> None:
        run(_decode, *codes, values)

    def samples(self) -> list[Sample]:
        values, noise = sample_numbers(), sample_noise()
        bits, codes = values.view(torch.int32), self.empty(len(values), values.device)
        sums, *known = self._measure(values, codes, EAGER)
        self._round(values, codes, noise[0], known, EAGER)
        return [
            Sample(_measure, [bits, codes[1], sums, *known], [1, 2, 3, 4, 5]),
            Sample(_round, [values, bits, *known, *noise, torch.empty_like(codes[0])], [7]),
            Sample(_decode, [*codes, torch.empty_like(values)], [2]),
        ]


# Two functions, because a compiler would compute what is the same for a row again for every few numbers of it. And with
# the bits as an argument of their own, as a compiler makes slow code of a change of type.


def _measure(
    bits: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    inverses: torch.Tensor,
    least: torch.Tensor,
    filled: torch.Tensor,
) -> None:
    """Find each block's scale, its inverse, the least code of a number above 0, and the bits set in each code."""
    assert bits.size(1) == BLOCK  # which a compiler takes for a constant, and makes faster code
    # From the bits, so that -0.0 is negative; and as floating-point numbers: compilers have slow sums of others.
    unsigned = (bits >> 31).to(torch.float32).sum(1, keepdim=True) == 0
    without_sign, with_sign = (scales.new_full((), each) for each in _LARGEST)
    largest = torch.where(unsigned, without_sign, with_sign)
    exact = ((bits & _MAGNITUDE).view(torch.float32).amax(1, keepdim=True) / largest).clamp_(min=_TINY)
    short = (exact.view(torch.int32) + _SHORT // 2).bitwise_and_(-_SHORT).view(torch.float32)
    finite = exact.isfinite()
    scale = torch.where(finite, short, exact)
    scales.copy_(torch.where(unsigned, -scale, scale))
    sums.copy_(low_sums(bits))
    inverses.copy_(scale.reciprocal())
    least.copy_(unsigned)
    filled.copy_(finite.logical_not().to(torch.int32) * 255)


def _round(
    values: torch.Tensor,
    bits: torch.Tensor,
    inverses: torch.Tensor,
    least: torch.Tensor,
    filled: torch.Tensor,
    noise: torch.Tensor,
    places: torch.Tensor,
    codes: torch.Tensor,
) -> None:
    """Round numbers over their scale."""
    assert values.size(1) == BLOCK
    # In place where it can be: fresh memory costs more than what is done in it.
    whole = (values.abs() * inverses).add_(_LEAST).view(torch.int32)
    random = (places * noise).bitwise_and_(_KEPT).bitwise_or_(_MARGIN)
    whole.add_(random).bitwise_right_shift_(_CUT_OFF)
    # A negative number has 255 - n, and a -0.0 a code of its own: without it a block might lose its sign.
    whole.bitwise_xor_(bits >> 31).bitwise_and_(255)
    codes.copy_(torch.maximum(whole, torch.minimum(bits & _MAGNITUDE, least)).bitwise_or_(filled))


def _decode(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    """Put the bits that were cut off back as zeros, and scale."""
    assert values.size(1) == BLOCK
    whole = values.view(torch.int32).copy_(codes)
    # All bits are 1 where the number is negative: shifting left by 24 puts a code's first bit, its sign, in front.
    sign = torch.bitwise_left_shift(whole, torch.where(torch.signbit(scales), 0, 24).to(torch.int32))
    sign.bitwise_right_shift_(31)
    whole.bitwise_xor_(sign).bitwise_and_(255).bitwise_left_shift_(_CUT_OFF).add_(_LEAST_BITS)
    values.sub_(_LEAST).mul_(scales.abs()).copysign_(sign.view(torch.float32))
