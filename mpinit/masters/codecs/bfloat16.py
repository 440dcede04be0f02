"""State in bfloat16, rounded stochastically: 2 bytes per number.

Adam's second moment changes by less than half a unit in the last place per step. Rounded to nearest it would never
change: 0.999 times a bfloat16 number is that number. With stochastic rounding, where the probability of rounding up is
the size of the part that is cut off, it changes by the right amount on average.
"""

from collections.abc import Sequence
from typing import Final, final

import torch

from ..arithmetic import Arithmetic, Sample
from .codec import BLOCK, Codec, Codes, low_sums, places, sample_noise, sample_numbers

# The usual nan: adding to the bits of others would overflow into numbers.
_NAN: Final = 0x7FC00000
_INF: Final = 0x7F800000


@final
class BFloat16(Codec):
    """``optimizer_state="bfloat16"``: relative error below 2**-7, on average none.

    Numbers above bfloat16's largest become inf, and nan stays nan.

    Example:
        >>> codec = BFloat16()
        >>> codes = codec.empty(1, torch.device("cpu"))
        >>> codec.encode_(torch.full((1, BLOCK), -3.0), codes)
        >>> codes[0][0, 0]
        tensor(-3., dtype=torch.bfloat16)
    """

    name = "bfloat16"

    def empty(self, rows: int, device: torch.device) -> Codes:
        return (torch.empty(rows, BLOCK, dtype=torch.bfloat16, device=device),)

    def _measure(self, values: torch.Tensor, codes: Codes, run: Arithmetic) -> Sequence[torch.Tensor]:
        sums = values.new_empty(len(values), 1)
        run(_sum, values.view(torch.int32), sums)
        return (sums,)

    def _round(
        self, values: torch.Tensor, codes: Codes, noise: torch.Tensor, known: Sequence[torch.Tensor], run: Arithmetic
    ) -> None:
        rounded = torch.empty_like(values, dtype=torch.int32)
        run(_round, values.view(torch.int32), noise, places(noise.device), rounded)
        codes[0].copy_(rounded.view(torch.float32))

    def _decode(self, codes: Codes, values: torch.Tensor, run: Arithmetic) -> None:
        values.copy_(codes[0])

    def samples(self) -> list[Sample]:
        bits = sample_numbers().view(torch.int32)
        return [
            Sample(_sum, [bits, torch.empty(len(bits), 1, dtype=torch.float32, device="cpu")], [1]),
            Sample(_round, [bits, *sample_noise(), torch.empty_like(bits)], [3]),
        ]


def _sum(bits: torch.Tensor, sums: torch.Tensor) -> None:
    assert bits.size(1) == BLOCK  # which a compiler takes for a constant, and makes faster code
    sums.copy_(low_sums(bits))


def _round(bits: torch.Tensor, noise: torch.Tensor, places: torch.Tensor, rounded: torch.Tensor) -> None:
    """Add up to one unit in the last place, and cut off."""
    assert bits.size(1) == BLOCK
    torch.mul(places, noise, out=rounded)
    rounded.bitwise_and_(0xFFFF).add_(bits).masked_fill_((bits & 0x7FFFFFFF) > _INF, _NAN).bitwise_and_(-0x10000)
