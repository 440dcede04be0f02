"""What :mod:`.float_split` does, in one pass over memory: compiled kernels for large weights, the same to the bit.

torch's compiler has vector code for 32-bit and 64-bit whole numbers and none for 16-bit ones. So two neighbours are
worked on together: as one 32-bit word of the weight, one of the remainder, and 64 bits of the master.
"""

from __future__ import annotations

import sys
from typing import Final

import torch

from ..basics.checksum import BLOCK, block_weights
from ..torch_internals.compiled_kernel import CompiledKernel

_PAIRS: Final = BLOCK // 2
_LOWER: Final = 0xFFFF
_UPPER: Final = -0x10000
# The kernels save about half a nanosecond a number of what torch's own operations take, and compiling takes seconds.
_WORTH_ROWS: Final = 1 << 26
# Numbers below which a call of a compiled function takes longer than is saved.
_LARGE: Final = 1 << 16


def is_large(weight: torch.Tensor) -> bool:
    """Whether a kernel of its own is worth it for a weight, and can be had: of whole blocks, lower bytes first."""
    return weight.numel() >= _LARGE and weight.numel() % BLOCK == 0 and sys.byteorder == "little"


def are_ready(device: torch.device, numbers: int) -> bool:
    """Whether both kernels are compiled for a device; so many numbers more count towards compiling them."""
    rows = numbers // BLOCK
    return _JOIN.is_ready(device, rows) and _TAKE_APART.is_ready(device, rows)


def has_words(halves: torch.Tensor) -> bool:
    """Whether one-dimensional 16-bit numbers begin at the beginning of a 32-bit word."""
    return halves.storage_offset() % 2 == 0 and halves.data_ptr() % 4 == 0


def words(halves: torch.Tensor) -> torch.Tensor:
    """16-bit numbers of whole blocks as 32-bit words, a row a block."""
    return halves.view(torch.int32).view(-1, _PAIRS)


def long_words(bits: torch.Tensor) -> torch.Tensor:
    """32-bit numbers of whole blocks as 64-bit words, a row a block."""
    return bits.view(torch.int64).view(-1, _PAIRS)


def join_(weight: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None:
    """Put masters together.

    Args:
        weight: :func:`words` of bfloat16 weights.
        remainder: :func:`words` of their remainders.
        master: :func:`long_words` of float32 masters, written to.

    Example:
        >>> weight, remainder = torch.full((64,), 1.5).bfloat16(), torch.ones(64, dtype=torch.int16)
        >>> master = torch.empty(64)
        >>> join_(words(weight), words(remainder), long_words(master))
        >>> (master - 1.5).unique() == 2**-23
        tensor([True])
    """
    _JOIN(weight, remainder, master)


def take_apart_(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor, checksums: torch.Tensor) -> None:
    """The reverse of :func:`join_`, rounding half away from zero; may be done again.

    Args:
        master: :func:`long_words` of float32 masters.
        weight: written to.
        remainder: written to.
        checksums: int32, (blocks, 1): gets :func:`~mpinit.basics.checksum.checksums` of the weight.
    """
    _TAKE_APART(master, weight, remainder, checksums, _factors(master.device))


def _join(weight: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None:
    assert weight.shape[1] == _PAIRS
    first = (weight << 16) + ((remainder << 16) >> 16)
    second = weight.bitwise_and(_UPPER) + (remainder >> 16)
    master.copy_(first.to(torch.int64).bitwise_and(0xFFFFFFFF).bitwise_or(second.to(torch.int64) << 32))


def _take_apart(
    master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor, checksums: torch.Tensor, factors: torch.Tensor
) -> None:
    assert master.shape[1] == _PAIRS
    first, second = master.to(torch.int32), (master >> 32).to(torch.int32)
    upper, next_upper = (first + 0x8000) >> 16, (second + 0x8000) >> 16
    weight.copy_(upper.bitwise_and(_LOWER).bitwise_or(next_upper << 16))
    remainder.copy_(first.bitwise_and(_LOWER).bitwise_or(second << 16))
    words = upper * factors[:_PAIRS] + next_upper * factors[_PAIRS:]
    # In float32, exactly, a half at a time: its sums have vector code.
    low, high = (half.to(torch.float32).sum(1, keepdim=True) for half in (words & _LOWER, (words >> 16) & _LOWER))
    checksums.copy_(low.to(torch.int32) + (high.to(torch.int32) << 16))


def _factors(device: torch.device) -> torch.Tensor:
    """The checksum's factors, those of the first numbers of all pairs before those of the second."""
    if device not in _factors_on:
        _factors_on[device] = block_weights(device).view(_PAIRS, 2).t().reshape(-1).contiguous()
    return _factors_on[device]


_factors_on: Final[dict[torch.device, torch.Tensor]] = {}


def _sample() -> list[torch.Tensor]:
    """Weights, remainders and masters of all kinds, as bits."""
    bits = torch.arange(200 * BLOCK, dtype=torch.int32) * 0x9E3779B + 0x7F7F7FFF
    halves = bits.view(torch.int16)
    return [words(halves[: bits.numel()]), words(halves[bits.numel() :]), long_words(bits)]


def _sample_apart() -> list[torch.Tensor]:
    weight, remainder, master = _sample()
    cpu = torch.device("cpu")
    return [master, weight.clone(), remainder.clone(), torch.empty(len(master), 1, dtype=torch.int32), _factors(cpu)]


_JOIN: Final = CompiledKernel(_join, lambda: [part.clone() for part in _sample()], _WORTH_ROWS)
_TAKE_APART: Final = CompiledKernel(_take_apart, _sample_apart, _WORTH_ROWS)
