"""Checksums of small blocks of memory: 4 bytes for 64 numbers, to see later which blocks somebody has written to.

A block's checksum is the sum of its 32-bit words, each times an odd weight of its own, modulo 2**32: a change of one
word never goes unseen, two words exchanged do not either, and any other change does with a chance of 2**-32.
"""

from __future__ import annotations

from typing import Any, Final

import torch

BLOCK: Final = 64

_weights: dict[torch.device, torch.Tensor] = {}


def block_weights(device: torch.device) -> torch.Tensor:
    """What a block's words are multiplied by: int32, one for each of its words."""
    if device not in _weights:
        # Odd, so that no change of a word is multiplied away, and far apart, so that they do not cancel one another.
        factors = [(2 * index + 1) * 0x9E3779B1 % 2**32 | 1 for index in range(BLOCK)]
        signed = [factor - 2**32 if factor >= 2**31 else factor for factor in factors]
        _weights[device] = torch.tensor(signed, dtype=torch.int32, device="cpu").to(device)
    return _weights[device]


def checksums(words: torch.Tensor) -> torch.Tensor:
    """One checksum a block.

    Args:
        words: int32, one-dimensional, contiguous; as many as fill whole blocks.

    Returns:
        int32, ``words.numel() // BLOCK`` of them.

    Example:
        >>> words = torch.zeros(128, dtype=torch.int32)
        >>> before = checksums(words)
        >>> words[3] = 1
        >>> (checksums(words) != before).tolist()
        [True, False]
    """
    blocks = words.view(-1, BLOCK)
    weights = block_weights(words.device)
    if words.device.type == "cpu":
        return torch.mv(blocks, weights)
    # No other device multiplies matrices of whole numbers.
    return (blocks * weights).sum(1, dtype=torch.int32)


def padded(size: int) -> int:
    """``size`` rounded up to whole blocks.

    Example:
        >>> padded(1), padded(64), padded(65)
        (64, 64, 128)
    """
    return -(-size // BLOCK) * BLOCK


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers as int32 words in whole blocks, one word for up to 4 bytes of a number; the rest is 0.

    Args:
        tensor: of any dtype and shape.

    Returns:
        int32, one-dimensional, new.

    Example:
        >>> words_of(torch.ones(2, dtype=torch.float64))[:5].tolist()
        [0, 1072693248, 0, 1072693248, 0]
    """
    kind: Any = {1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    numbers = tensor.detach().reshape(-1).view(kind)
    words = torch.zeros(padded(numbers.numel()), dtype=torch.int32, device=tensor.device)
    words[: numbers.numel()].copy_(numbers)
    return words
