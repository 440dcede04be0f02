"""State in bfloat16, rounded stochastically: 2 bytes per number.

Adam's second moment changes by less than half a unit in the last place per step. Rounded to nearest it would never
change: 0.999 times a bfloat16 number is that number. With stochastic rounding, where the probability of rounding up is
the size of the part that is cut off, it changes by the right amount on average.
"""

from typing import Final, final

import torch

from .codec import BLOCK, Codec, Codes, call_in_chunks, noise, noise_arguments

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

    def encode_(self, values: torch.Tensor, codes: Codes, tensors: torch.Tensor | None = None) -> None:
        """Add up to one unit in the last place, and cut off."""
        bits, codes_of_bits = values.view(torch.int32), codes[0].view(torch.int16)
        call_in_chunks(_round, bits, codes_of_bits, *noise_arguments(values, tensors))

    def decode_(self, codes: Codes, values: torch.Tensor) -> None:
        values.copy_(codes[0])


def _round(
    bits: torch.Tensor, codes: torch.Tensor, numbers: torch.Tensor, groups: torch.Tensor, places: torch.Tensor
) -> None:
    assert bits.shape[1] == BLOCK
    up = noise(bits, numbers, groups, places).bitwise_and_(0xFFFF).add_(bits)
    codes.copy_(torch.where((bits & 0x7FFFFFFF) > _INF, _NAN, up).bitwise_right_shift_(16))
