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
# Rows that are rounded in float32 memory before they are copied, so that it is little and in the CPU's cache.
_AT_ONCE: Final = 1 << 12


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
        factor, summand = seeds(sums, rows)
        places = places_in_a_row(values.device)
        at_once = _AT_ONCE if values.device.type == "cpu" else 64 * _AT_ONCE
        rounded = torch.empty_like(bits[:at_once])
        for begin in range(0, len(values), at_once):
            part = slice(begin, begin + at_once)
            into = rounded[: len(values[part])]
            _ROUND(values[part], bits[part], factor[part], summand[part], into, places)
            codes[0][part].copy_(into.view(torch.float32))

    def decode_(self, codes: Codes, values: torch.Tensor) -> None:
        """Widen."""
        values.copy_(codes[0])


def _sum(bits: torch.Tensor, sums: torch.Tensor) -> None:
    assert bits.shape[1] == BLOCK
    sums.copy_(low_halves(bits))


def _round(
    values: torch.Tensor,
    bits: torch.Tensor,
    factor: torch.Tensor,
    summand: torch.Tensor,
    rounded: torch.Tensor,
    places: torch.Tensor,
) -> None:
    assert bits.shape[1] == BLOCK
    up = noise(bits, factor, summand, places).bitwise_right_shift(16)
    # eq: a number that is nan is not itself.
    rounded.copy_(torch.where(values.eq(values), (bits + up + 0x8000).bitwise_and(-0x10000), _NAN))


def _sample() -> list[torch.Tensor]:
    values = torch.linspace(-3, 3, 200 * BLOCK).pow(7).view(-1, BLOCK)
    bits = values.view(torch.int32)
    return [values, bits, *seeds(low_halves(bits), [len(values)]), torch.empty_like(bits), places_in_a_row(bits.device)]


_SUM: Final = CompiledKernel(_sum, lambda: [_sample()[1], torch.empty(200, 1)])
_ROUND: Final = CompiledKernel(_round, _sample)
