"""Encodings of optimizers' states: error bounds, no bias, the same codes again, and tensors that read as numbers.

Below the public face: the codecs are tried on chosen numbers, which a training does not reach.
"""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from session_device import device, placed

from mpinit.masters.codecs.bfloat16 import BFloat16
from mpinit.masters.codecs.codec import BLOCK, Codec, tensor_rows
from mpinit.masters.codecs.encoded import EncodedState, Together
from mpinit.masters.codecs.minifloat import Minifloat

CODECS = [BFloat16(), Minifloat()]
each = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: str(codec.name))


def encoded(codec: Codec, values: torch.Tensor) -> list[torch.Tensor]:
    return EncodedState.of(values, codec).codes


def decoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return EncodedState.of(values, codec).decoded()


def some(kind: str, count: int = 70_001) -> torch.Tensor:
    torch.manual_seed(0)
    values = torch.randn(count) * torch.randn(count).mul(3).exp() * 1e-6
    return values if kind == "signed" else values.square()


@pytest.mark.parametrize("kind", ["signed", "squares"])
def test_errors_stay_below_the_documented_bounds(kind: str) -> None:
    values = some(kind)
    assert ((decoded(BFloat16(), values) - values).abs() <= 2.0**-7 * values.abs()).all()
    blocks = torch.cat([values.abs(), torch.zeros(-len(values) % BLOCK)]).view(-1, BLOCK)
    largest = blocks.amax(1).repeat_interleave(BLOCK)[: len(values)]
    of_largest = 2**-18 if kind == "signed" else 2**-34
    bound = values.abs() / 8 + of_largest * largest
    assert ((decoded(Minifloat(), values) - values).abs() <= bound).all()


@each
@pytest.mark.parametrize("kind", ["signed", "squares"])
def test_codes_of_what_was_decoded_are_the_same(codec: Codec, kind: str) -> None:
    values = some(kind)
    once = encoded(codec, values)
    assert all(map(torch.equal, encoded(codec, decoded(codec, values)), once))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.floats(-(2.0**99), 2.0**99, width=32).filter(lambda x: x == 0 or abs(x) > 1e-20), min_size=1, max_size=300
    )
)
def test_codes_of_any_numbers_come_back(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    for codec in CODECS:
        assert all(map(torch.equal, encoded(codec, decoded(codec, values)), encoded(codec, values)))


@each
@pytest.mark.parametrize("kind", ["signed", "squares"])
def test_rounding_is_right_on_average(codec: Codec, kind: str) -> None:
    values = some(kind, 128).repeat(500).view(500, 128)
    means = torch.stack([decoded(codec, row * (1 + 1e-4 * index)) for index, row in enumerate(values)]).double().mean(0)
    expected = torch.stack([row * (1 + 1e-4 * index) for index, row in enumerate(values)]).double().mean(0)
    largest = expected.abs().max().item()
    torch.testing.assert_close(means, expected, rtol=1e-2, atol=2e-3 * largest)


@each
def test_slow_average_converges(codec: Codec) -> None:
    """Check that an average converges, which would never change if it were rounded to nearest."""
    states = torch.ones(4096)
    target = torch.full((4096,), 0.25)
    for _ in range(1500):
        states = decoded(codec, states.lerp(target, 1e-3))
    assert states.mean().item() == pytest.approx(0.25 + 0.75 * 0.999**1500, rel=0.02)


@each
@pytest.mark.parametrize("kind", ["signed", "squares"])
def test_small_states_decay_beside_a_large_number(codec: Codec, kind: str) -> None:
    """Rounded a little too often upwards, small numbers would be too large by it at each step, and end far above."""
    states = torch.full((64, BLOCK), 0.01)
    if kind == "signed":
        states[:, ::2] = -0.01
    for _ in range(1000):
        states[:, 0] = 1.0
        states = decoded(codec, (states * 0.998).view(-1)).view_as(states)
    assert states[:, 1:].abs().mean().item() == pytest.approx(0.01 * 0.998**1000, rel=0.1)


@each
def test_zero_and_small_positive_states_are_kept_apart(codec: Codec) -> None:
    values = torch.zeros(300)
    values[::7] = torch.logspace(-20, 2, 43)
    back = decoded(codec, values)
    assert torch.equal(back == 0, values == 0)
    signed = torch.tensor([0.0, -0.0, 3.0, -1e-9])
    assert torch.signbit(decoded(codec, signed)).tolist() == [False, True, False, True]


@each
def test_inf_and_nan_are_decoded(codec: Codec) -> None:
    odd = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert decoded(codec, odd).isnan().all()
    assert not decoded(codec, torch.tensor([1.0, float("inf"), -2.0])).isfinite()[1]
    assert decoded(codec, torch.tensor([3e38, -3e38])).isfinite().all()


@each
@pytest.mark.parametrize("length", [1, 127, 128, 129, 65536, 65537])
def test_any_length(codec: Codec, length: int) -> None:
    values = torch.rand(length) + 0.5
    torch.testing.assert_close(decoded(codec, values), values, rtol=1 / 8, atol=0)


@each
def test_an_encoded_tensor_reads_as_its_numbers(codec: Codec) -> None:
    values = torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last)
    state = EncodedState.of(values, codec)
    assert state.shape == values.shape and state.stride() == values.stride() and state.dtype == torch.float32
    assert torch.equal(state.decoded(), state + 0) and torch.equal(state[2], state.decoded()[2])
    torch.testing.assert_close(state.decoded(), values, rtol=1 / 8, atol=1e-4)
    assert "EncodedState" in repr(state) and type(state.clone()) is torch.Tensor
    assert state.code_bytes < values.nbytes * 0.6
    state.mul_(2)
    torch.testing.assert_close(state.decoded(), 2 * values, rtol=1 / 8, atol=8e-3)
    assert type(torch.empty_like(values).copy_(state)) is torch.Tensor
    torch._foreach_zero_([state])
    assert not state.any()


@pytest.mark.device
@each
def test_states_written_together_have_the_codes_of_each_alone(codec: Codec) -> None:
    """Use sizes with and without a part of a row, of a group of rows, and of less than one group; inf and nan too."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(5000,), (64, 64), (1,), (40, 128), (8, 3, 5, 5), (33, 128, 3), (129,)]

    def some_values() -> list[torch.Tensor]:
        found = [torch.randn(size, generator=generator) for size in sizes]
        found[1].square_()
        found[3][2, 3], found[3][9, 1] = math.inf, math.nan
        found[4] = found[4].to(memory_format=torch.channels_last)
        return [placed(values) for values in found]

    alone = [EncodedState.of(values, codec) for values in some_values()]
    together = [EncodedState.of(values, codec) for values in some_values()]
    values = some_values()
    for state, each_values in zip(alone, values, strict=True):
        state.write(each_values)
    group = Together(together)
    assert len(set(group.rows)) > 4
    torch._foreach_copy_(group.parts, values)
    group.encode(tensor_rows(group.rows, device()))
    for ours, theirs, found in zip(together, alone, Together(together).decode().parts, strict=True):
        for our_codes, their_codes in zip(ours.codes, theirs.codes, strict=True):
            assert torch.equal(our_codes.view(torch.uint8), their_codes.view(torch.uint8))
        assert found.stride() == theirs.stride()
        torch.testing.assert_close(found, theirs.decoded(), rtol=0, atol=0, equal_nan=True)


@each
def test_a_write_to_a_part_is_refused(codec: Codec) -> None:
    state = EncodedState.of(torch.randn(10, 10), codec)
    with pytest.raises(RuntimeError, match="copy of an encoded state"):
        state[2].zero_()
    with pytest.raises(RuntimeError, match="copy of an encoded state"):
        state.view(-1).add_(1)


@each
def test_what_reads_memory_reads_the_numbers_or_is_refused(codec: Codec) -> None:
    """Check numpy and lists, which read a copy, and DLPack and shared memory, which would crash the process."""
    state = EncodedState.of(torch.randn(4, 300), codec)
    for tensor in (state, state[1], state.view(-1)):
        numbers = tensor.clone()
        assert type(numbers) is torch.Tensor and tensor.tolist() == numbers.tolist()
        for array in (tensor.numpy(), np.asarray(tensor), np.array(tensor), tensor.numpy(force=True)):
            assert array.dtype == np.float32 and (array == numbers.numpy()).all()
        assert np.asarray(tensor, dtype=np.float64).dtype == np.float64
        with pytest.raises(ValueError, match="read-only"):
            tensor.numpy()[:] = 0
        assert f"{tensor.view(-1)[0]:.3f}" == f"{numbers.view(-1)[0]:.3f}"
        assert torch.equal(copy.deepcopy(tensor), numbers)
        assert torch.equal(pickle.loads(pickle.dumps(tensor)), numbers)
        for read in (torch.from_dlpack, np.from_dlpack):
            with pytest.raises(BufferError, match=r"has codes there: pass a float32 copy"):
                read(tensor)
        with pytest.raises(RuntimeError, match=r"has codes there: pass a float32 copy"):
            tensor.share_memory_()


@each
def test_writes_by_an_index_or_a_mask_are_encoded(codec: Codec) -> None:
    state = EncodedState.of(torch.randn(4, 300), codec)
    state[state > 0] = 0.0
    assert (state.decoded() <= 0).all()
    state[torch.tensor([1, 3])] = 5.0
    torch.testing.assert_close(state.decoded()[1::2], torch.full((2, 300), 5.0), rtol=0.01, atol=0)


@each
def test_copies_and_unpickled_states_are_float32_tensors(codec: Codec) -> None:
    """Check that a pickle contains the codes, and is as small."""
    state = EncodedState.of(torch.randn(100, 50).t(), codec)
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), copy.copy(state)):
        assert type(other) is torch.Tensor and other.stride() == state.stride()
        assert torch.equal(other, state.decoded())
        assert all(map(torch.equal, EncodedState.of(other, codec).codes, state.codes))
        other.zero_()
    first, second = copy.deepcopy([state, state])
    assert first is second
    assert state.any() and len(pickle.dumps(state)) < 3 * 5000
