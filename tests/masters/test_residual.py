"""The residual of a cast: every float32 pattern comes back bit for bit; what was changed keeps what it was given."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from mpinit.basics.dtypes import cast_within_range
from mpinit.masters.residual import BLOCK, Residual, decode, encode

DTYPES = [torch.float16, torch.bfloat16]
SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1e-45,
    -1e-40,
    65504.0,
    65520.0,
    3.4e38,
    6e-8,
    1.00390625,
]


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16).tolist()


def encoded(original: Tensor, dtype: torch.dtype) -> Residual | None:
    return encode(original, functools.partial(torch.Tensor.to, dtype=dtype))


def there_and_back(
    original: Tensor, dtype: torch.dtype, cast: Any = torch.Tensor.to, may_change: bool = True
) -> Tensor:
    residual = encode(original, lambda part: cast(part, dtype), may_change=may_change)
    narrow = cast(original, dtype)
    return narrow.float() if residual is None else decode(residual, narrow)


@given(
    arrays.arrays("int32", st.integers(1, 9 * BLOCK), elements=st.integers(-(2**31), 2**31 - 1)),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.Tensor.to, cast_within_range]),
)
def test_any_bits_come_back(patterns: object, dtype: torch.dtype, cast: object) -> None:
    original = torch.from_numpy(patterns).view(torch.float32)  # type: ignore[arg-type]
    for may_change in (True, False):
        assert bits(there_and_back(original, dtype, cast, may_change)) == bits(original)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-40, 1e-8, 0.02, 1.0, 1e6])
def test_what_weights_look_like_comes_back_over_several_chunks(dtype: torch.dtype, scale: float) -> None:
    original = torch.cat([torch.randn(200_001) * scale, torch.tensor(SPECIAL)])
    assert bits(there_and_back(original, dtype)) == bits(original)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_as_they_are_take_little_more_than_two_bytes(dtype: torch.dtype) -> None:
    original = torch.randn(1 << 16) * 0.02
    residual = encoded(original, dtype)
    assert residual is not None
    assert residual.differences is not None
    assert residual.places is not None
    assert residual.checksums is not None
    parts = (residual.differences, residual.places, residual.values, residual.checksums)
    assert sum(part.numel() * part.element_size() for part in parts) < 2.25 * len(original)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_kept_of_what_loses_nothing(dtype: torch.dtype) -> None:
    assert encoded(torch.randn(1000), dtype) is not None
    assert encoded(torch.randn(1000).to(dtype).float(), dtype) is None
    assert encoded(torch.empty(0), dtype) is None


@given(
    st.integers(1, 9 * BLOCK),
    st.lists(st.tuples(st.integers(0, 9 * BLOCK - 1), st.integers(1, 2**16 - 1)), max_size=5),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_changed_blocks_take_the_present_values(
    count: int, changes: list[tuple[int, int]], dtype: torch.dtype, tiny: bool
) -> None:
    torch.manual_seed(count)
    original = torch.randn(count) * (1e-9 if tiny else 0.1)
    cast = original.to(dtype)
    residual = encoded(original, cast.dtype)
    if residual is None:
        return
    present = cast.clone()
    words = present.view(torch.int16)
    for place, flipped in changes:
        if place < count:
            words[place] ^= torch.tensor(flipped, dtype=torch.int32).to(torch.int16)
    restored = decode(residual, present)
    for start in range(0, count, BLOCK):
        block = slice(start, start + BLOCK)
        same = bits(present[block]) == bits(cast[block])
        assert bits(restored[block]) == bits(original[block] if same else present[block].float())


@pytest.mark.parametrize(
    "change", [torch.neg, lambda t: t.roll(1), lambda t: t * 2, torch.zeros_like, lambda t: t.flip(0)]
)
def test_changes_of_whole_tensors_are_noticed_in_every_block(change: object) -> None:
    original = torch.randn(1000 * BLOCK)
    cast = original.bfloat16()
    residual = encoded(original, cast.dtype)
    assert residual is not None
    present = change(cast)  # type: ignore[operator]
    assert torch.equal(decode(residual, present), present.float())


@pytest.mark.parametrize(
    ("given_dtype", "dtype"),
    [
        (torch.float64, torch.float32),
        (torch.float64, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
def test_other_pairs_of_types_come_back_too(given_dtype: torch.dtype, dtype: torch.dtype) -> None:
    original = (torch.randn(300, dtype=torch.float64) * 1e-3).to(given_dtype)
    cast = original.to(dtype)
    residual = encoded(original, cast.dtype)
    assert residual is not None
    assert torch.equal(decode(residual, cast), original)
    present = cast.clone()
    present[70] = 7.0
    restored = decode(residual, present)
    assert torch.equal(restored[:64], original[:64])
    assert torch.equal(restored[64:128], present[64:128].to(given_dtype))
    assert torch.equal(restored[128:], original[128:])
