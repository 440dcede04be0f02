"""State in bfloat16, rounded stochastically: 2 bytes a number.

An average that moves by less than half a unit in the last place a step, as Adam's second moment does, never moves when
it is rounded to nearest: 0.999 of a bfloat16 number is that number. Rounded up as often as the part cut off is large,
it moves by the right amount on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import torch

from ...torch_internals.compiled_kernel import CompiledKernel
from .codec import BLOCK, Codec, Codes, low_halves, noise, places_in_a_row, seeds

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
        >>> codec.encode_(torch.full((1, BLOCK), -3.0), codes, [1])
        >>> codes[0][0, 0]
        tensor(-3., dtype=torch.bfloat16)
    """

    name = "bfloat16"

    def empty(self, rows: int, device: torch.device) -> Codes:
        """One bfloat16 tensor."""
        return (torch.empty(rows, BLOCK, dtype=torch.bfloat16, device=device),)

    def encode_(self, values: torch.Tensor, codes: Codes, rows: Sequence[int]) -> None:
        """Add up to one unit in the last place, and cut off."""
        bits = values.view(torch.int32)
        sums = torch.empty(len(values), 1, device=values.device)
        _SUM(bits, sums)
        places = places_in_a_row(values.device).view(-1, 2).t().contiguous().view(-1)
        _ROUND(values.view(torch.int64), *seeds(sums, rows), codes[0].view(torch.int32), places)

    def decode_(self, codes: Codes, values: torch.Tensor) -> None:
        """Widen."""
        values.copy_(codes[0])


def _sum(bits: torch.Tensor, sums: torch.Tensor) -> None:
    assert bits.shape[1] == BLOCK
    sums.copy_(low_halves(bits))


def _round(
    long: torch.Tensor, factor: torch.Tensor, summand: torch.Tensor, codes: torch.Tensor, places: torch.Tensor
) -> None:
    # Two neighbours at once, the places of all first ones before those of the second: torch's compiler has vector code
    # for 64 bits and for 32, and none for 16.
    assert long.shape[1] == BLOCK // 2
    first, second = (
        _rounded(bits, factor, summand, own)
        for bits, own in zip((long.to(torch.int32), (long >> 32).to(torch.int32)), places.chunk(2), strict=True)
    )
    codes.copy_(((first >> 16) & 0xFFFF) | (second & -0x10000))


def _rounded(bits: torch.Tensor, factor: torch.Tensor, summand: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    up = noise(bits, factor, summand, places).bitwise_right_shift(16)
    return torch.where((bits & 0x7FFFFFFF) > _INF, _NAN, bits + up + 0x8000)


def _sample() -> list[torch.Tensor]:
    values = torch.linspace(-3, 3, 200 * BLOCK).pow(7).view(-1, BLOCK)
    values[::9, ::7] = torch.nan
    bits = values.view(torch.int32)
    codes = torch.zeros(200, BLOCK // 2, dtype=torch.int32)
    return [values.view(torch.int64), *seeds(low_halves(bits), [200]), codes, places_in_a_row(bits.device)]


_SUM: Final = CompiledKernel(_sum, lambda: [_sample()[0].view(torch.int32), torch.empty(200, 1)])
_ROUND: Final = CompiledKernel(_round, _sample)
