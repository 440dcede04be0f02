"""State in bfloat16, rounded stochastically: 2 bytes a number.

An average that moves by less than half a unit in the last place a step, as Adam's second moment does, never moves when
it is rounded to nearest: 0.999 of a bfloat16 number is that number. Rounded up as often as the part cut off is large,
it moves by the right amount on average.
"""

from __future__ import annotations

from typing import final

import torch

from .codec import Codec, Codes, chunks, noise


@final
class BFloat16(Codec):
    """``optimizer_state="bfloat16"``: relative error below 2**-7, on average none.

    Numbers above bfloat16's largest become inf, and nan stays nan.

    Example:
        >>> codec = BFloat16()
        >>> codes = codec.empty(2, torch.device("cpu"))
        >>> codec.encode_(torch.tensor([0.5, -3.0]), codes)
        >>> codes[0]
        tensor([ 0.5000, -3.0000], dtype=torch.bfloat16)
    """

    name = "bfloat16"

    def empty(self, length: int, device: torch.device) -> Codes:
        """One bfloat16 tensor."""
        return (torch.empty(length, dtype=torch.bfloat16, device=device),)

    def encode_(self, values: torch.Tensor, codes: Codes) -> None:
        """Add up to one unit in the last place, and cut off."""
        upper = codes[0].view(torch.int16)
        for start, part in chunks(values):
            # Other nan than the usual one would overflow into numbers.
            bits = part.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
            rounded = noise(bits).bitwise_right_shift_(16).add_(bits).add_(0x8000).bitwise_right_shift_(16)
            upper[start : start + len(bits)].copy_(rounded)

    def decode_(self, codes: Codes, values: torch.Tensor) -> None:
        """Widen."""
        values.copy_(codes[0])
