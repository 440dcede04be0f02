"""Checksums of blocks: every dtype has words, and a change of any one number is seen."""

from __future__ import annotations

import pytest
import torch

from mpinit.basics.checksum import BLOCK, checksums, words_of

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.int8,
    torch.float8_e4m3fn,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, BLOCK, BLOCK + 1])
def test_a_change_of_any_number_changes_its_blocks_checksum(dtype: torch.dtype, size: int) -> None:
    numbers = torch.zeros(size, dtype=dtype)
    before = checksums(words_of(numbers))
    for index in range(size):
        numbers[index] = 1
        changed = (checksums(words_of(numbers)) != before).nonzero().flatten().tolist()
        assert changed == [index * max(1, numbers.element_size() // 4) // BLOCK], index
        numbers[index] = 0
    assert torch.equal(checksums(words_of(numbers)), before)


def test_of_a_scalar_and_of_what_is_not_contiguous() -> None:
    assert words_of(torch.tensor(1.0, dtype=torch.float64))[:2].tolist() == [0, 0x3FF00000]
    transposed = torch.arange(6, dtype=torch.float32).view(2, 3).t()
    assert torch.equal(words_of(transposed), words_of(transposed.contiguous()))
