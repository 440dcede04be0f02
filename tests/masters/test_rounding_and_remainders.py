"""Rounding of float32 numbers to 16-bit weights, and remainders: together they are the float32 number again.

Below the public face: the split is tried on every kind of float32 number.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mpinit
from mpinit.masters import law

# bfloat16 has 8 significant bits, and float32's smallest exponent.
BITS, SMALLEST = 8, -133


def spacing(values: np.ndarray) -> np.ndarray:
    """The distance between neighbouring bfloat16 numbers around each value, in float64."""
    return np.ldexp(1.0, np.maximum(np.frexp(np.abs(values))[1] - BITS, SMALLEST))


def half_away(values: np.ndarray) -> np.ndarray:
    exact = values.astype(np.float64)
    return np.copysign(np.floor(np.abs(exact) / spacing(exact) + 0.5) * spacing(exact), exact)


def half_to_even(values: np.ndarray) -> np.ndarray:
    exact = values.astype(np.float64)
    return np.rint(exact / spacing(exact)) * spacing(exact)


RULES = {"split": half_away, True: half_to_even}


def parts(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight, rest = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    law.split(values.clone(), weight, rest)
    return weight, rest


def join(weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    values = torch.empty(len(weight))
    law.join(weight, rest, values)
    return values


def exact(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The master of values: 0 below 4.6e-41, and infinite above 3.396e38."""
    return torch.where((weight == 0) | weight.isinf(), weight.float(), values)


def rounded(values: np.ndarray) -> np.ndarray:
    taken = torch.from_numpy(values.copy())
    weight, rest = parts(taken)
    assert torch.equal(join(weight, rest), exact(weight, taken)), "the master itself is exact"
    return weight.double().numpy()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64))
def test_a_float32_number_comes_back_bit_for_bit(bits: list[int]) -> None:
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    numbers = values[~values.isnan()]
    weight, rest = parts(numbers)
    assert torch.equal(join(weight, rest).view(torch.int32), exact(weight, numbers).view(torch.int32))


@given(st.lists(st.integers(1, 2**23 - 1), min_size=1), st.booleans())
def test_every_nan_stays_one(mantissas: list[int], is_negative: bool) -> None:
    """Round nans with all bits set, as CUDA's have: rounding up must not overflow the largest whole number."""
    sign = -(2**31) if is_negative else 0
    values = torch.tensor([0x7F800000 + each + sign for each in [*mantissas, 2**23 - 1]], dtype=torch.int32)
    weight, rest = parts(values.view(torch.float32))
    assert weight.isnan().all()
    assert join(weight, rest).isnan().all()


@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=64))
def test_a_written_weight_counts_whatever_its_remainder_was(rests: list[int]) -> None:
    rest = torch.tensor(rests, dtype=torch.int16)
    for written in (0.0, -0.0, 0.3, -7e30, float("inf"), -float("inf"), float("nan")):
        weight = torch.full(rest.shape, written, dtype=torch.bfloat16)
        joined = join(weight, rest)
        assert torch.equal(parts(joined)[0].nan_to_num(7.0, 3e38, -3e38), weight.nan_to_num(7.0, 3e38, -3e38))
        assert written in (0.3, -7e30) or torch.equal(joined.nan_to_num(7.0), weight.float().nan_to_num(7.0))


def test_the_rules_themselves_on_ties() -> None:
    # Around 1 bfloat16 numbers are 2**-7 apart.
    ties = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, -1 - 3 * 2.0**-8], dtype=np.float32)
    assert half_away(ties).tolist() == [1 + 2.0**-7, 1 + 2.0**-6, -1 - 2.0**-7, -1 - 2.0**-6]
    assert half_to_even(ties).tolist() == [1.0, 1 + 2.0**-6, -1.0, -1 - 2.0**-6]
    assert rounded(ties).tolist() == half_away(ties).tolist()


@given(st.lists(st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127), min_size=1, max_size=32))
def test_split_rounds_half_away_from_zero(numbers: list[float]) -> None:
    values = np.array(numbers, dtype=np.float32)
    assert np.array_equal(rounded(values), half_away(values))


@given(st.lists(st.integers(0, 2**15 - 1), min_size=1, max_size=32), st.booleans())
def test_split_rounds_every_kind_of_tie_away(uppers: list[int], negative: bool) -> None:
    bits = np.array([upper << 16 | 0x8000 for upper in uppers], dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.where(negative, -values, values)[np.isfinite(values) & (np.abs(values) < 3e38)]
    if len(values):
        assert np.array_equal(rounded(values), half_away(values))
        assert np.all(np.abs(rounded(values)) > np.abs(values)), "all of them were ties"


@pytest.mark.parametrize("kind", ["split", True])
@pytest.mark.parametrize("size", [6, 300_000])
def test_a_step_leaves_weights_rounded_by_the_rule_of_their_kind(kind: Any, size: int) -> None:
    """Also where a bucket is worked on in chunks; a sixth of the masters end on a tie."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([1.0, -1.0, 0.5, 3.0, -0.25, 0.125]).repeat(size // 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mpinit.initialize(model, optimizer, "O5", master_weights=kind)
    step = torch.tensor([2.0**-8, -(2.0**-8), 0.3, -1 / 3, 2.0**-20, 0.1]).repeat(size // 6)
    with mpinit.scale_loss((model.weight.float() * -step).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    master, weight = model.state_dict()["weight"], next(model.parameters()).detach()
    assert weight.dtype == torch.bfloat16 and master.dtype == torch.float32
    assert np.array_equal(weight.double().numpy(), RULES[kind](master.numpy()))
    assert weight[:2].tolist() == ([1 + 2.0**-7, -1 - 2.0**-7] if kind == "split" else [1.0, -1.0])
