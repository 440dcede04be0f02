"""Inputs whose numbers 16 bits spoil: finite ones stay finite, others are warned of with the entry that keeps them.

Below the public face: the criterion is tried on many tensors, without a model.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import CASES, Parts, quietly
from torch import Tensor, nn

import mpinit
from mpinit.model.input_values import loss_of_input

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LOWEST = torch.finfo(F32).min
LEVELS = {"O2": F16, "O3": F16, "O5": BF16}


class Attention(nn.Module):
    """A head of attention with an additive mask, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / math.sqrt(8) + mask
        return x + self.out(scores.softmax(-1) @ value)


def masked(fill: float) -> Tensor:
    """A causal mask, and where float32 adds no score to the fill a padded sentence whose first row is masked."""
    mask = torch.full((2, 6, 6), fill).triu(1)
    if fill <= -1e9:
        mask[1, 0] = fill
    return mask


@pytest.mark.parametrize("fill", [LOWEST, -1e9, -65520.0, -1e4])
@pytest.mark.parametrize("level", LEVELS)
def test_finite_masks_give_float32s_numbers(level: str, fill: float) -> None:
    torch.manual_seed(0)
    model, x, mask = Attention(), torch.randn(2, 6, 8), masked(fill)
    expected = model(x, mask)
    quietly(model, level)
    output = model(x, mask)
    assert torch.allclose(output, expected, atol=0.05)
    assert torch.equal(mask, masked(fill)), "the caller's mask is what it was"


@pytest.mark.parametrize("level", LEVELS)
def test_infinite_masks_stay_infinite(level: str) -> None:
    def seen(self: Any, value: Tensor) -> Tensor:
        seen.got = value  # type: ignore[attr-defined]
        return self.linear(value)

    model = quietly(Parts(seen, linear=nn.Linear(6, 6)), level)
    given = torch.tensor([[0.0, -0.0, float("inf"), -float("inf"), float("nan"), LOWEST]])
    model(given)
    largest = torch.finfo(LEVELS[level]).max
    expected = torch.tensor([[0.0, -0.0, float("inf"), -float("inf"), float("nan"), -largest]])
    got = seen.got.float()  # type: ignore[attr-defined]
    assert torch.equal(got.nan_to_num(5.0), expected.nan_to_num(5.0))
    assert torch.equal(got[:, [0, 1, 2, 3, 5]].signbit(), expected[:, [0, 1, 2, 3, 5]].signbit())


@pytest.mark.parametrize("kind", ["one tensor", "two", "a dict"])
@pytest.mark.parametrize("given", [F32, torch.float64, BF16])
def test_clamped_numbers_are_no_writes(kind: str, given: torch.dtype) -> None:
    def forward(self: Any, value: Any, *more: Any) -> Tensor:
        tensor = value["mask"] if isinstance(value, dict) else value
        assert tensor.dtype is F16 and tensor.isfinite().all()
        tensor[0, 0] = 3.0
        return self.linear(tensor.clamp(-1, 1))

    model = quietly(Parts(forward, linear=nn.Linear(4, 4)))
    mask = torch.full((2, 4), -1e9, dtype=given)
    expected = mask.clone()
    expected[0, 0] = 3.0
    model(*{"one tensor": (mask,), "two": (mask, torch.ones(1)), "a dict": ({"mask": mask},)}[kind])
    assert torch.equal(mask, expected)


def test_gradients_of_inputs_flow_through_the_clamp() -> None:
    model = quietly(Parts(lambda self, x: x * 2, linear=nn.Linear(2, 2)))
    x = torch.tensor([1.0, -1e9], requires_grad=True)
    output = model(x)
    assert torch.equal(output[0], torch.tensor(2.0))
    output[0].backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 0.0]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("how", ["compiled", "vmap", "traced", "inference"])
def test_without_reading_numbers_the_clamp_is_the_same(how: str) -> None:
    torch.manual_seed(0)
    model, x, mask = Attention(), torch.randn(2, 6, 8), masked(LOWEST)
    quietly(model)
    expected = model(x, mask)
    if how == "compiled":
        torch._dynamo.reset()
        output = torch.compile(model, fullgraph=True, backend="aot_eager")(x, mask)
    elif how == "vmap":
        output = torch.func.vmap(model)(x[:, None], mask[:, None])[:, 0]
    elif how == "traced":
        output = torch.jit.trace(model, (x, torch.zeros_like(mask)))(x, mask)
    else:
        with torch.inference_mode():
            output = model(x, mask)
    assert output.isfinite().all()
    assert torch.allclose(output, expected, atol=1e-3)


class TimedUNet(nn.Module):
    """A convolution whose features are shifted by an embedding of a timestep."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.time, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(16, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(8, device=x.device) * (math.log(10_000.0) / 8))
        angles = timesteps[:, None].float() * frequencies
        embedding = torch.cat([angles.sin(), angles.cos()], dim=1).to(x.dtype)
        return self.last(torch.relu(self.first(x) + self.time(embedding)[:, :, None, None]))


@pytest.mark.parametrize("level", ["O5", "O3", "O2"])
@pytest.mark.filterwarnings("default:.*values for good")
def test_timesteps_are_warned_of_and_the_entry_cures_it(level: str) -> None:
    torch.manual_seed(0)
    x, steps = torch.randn(3, 1, 8, 8), torch.tensor([998.39, 641.25, 3000.9])
    model = TimedUNet()
    expected = model(x, steps)

    def error(**keywords: Any) -> float:
        quietly(model, level, **keywords)
        with torch.no_grad():
            found = float((model(x, steps) - expected).abs().max() / expected.abs().max())
        mpinit.undo(model)
        return found

    with pytest.warns(UserWarning, match="the input 'timesteps' of TimedUNet.forward .*loses values") as caught:
        spoilt = error()
    assert len(caught) == 1 and "keep_inputs=['timesteps']" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cured = error(keep_inputs="timesteps")
    assert cured < 0.02 < spoilt


@pytest.mark.filterwarnings("default:.*values for good")
class Batch(Tensor):
    """A batch that is sliced by its first dimension alone, as MONAI's MetaTensor slices its metadata."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and args[0].ndim == 1:
            raise ValueError("no batch")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("level", LEVELS)
def test_inputs_of_a_class_that_cannot_be_sliced_are_read(level: str) -> None:
    model = quietly(Parts(lambda self, x: self.layer(x), layer=nn.Linear(4, 2)), level)
    x = torch.randn(3, 4)
    output = model(x.as_subclass(Batch))
    assert type(output) is Batch and torch.equal(output.as_subclass(Tensor), model(x))
    with pytest.warns(UserWarning, match="has numbers up to 999999"):
        model = quietly(Parts(lambda self, x: self.layer(x), layer=nn.Linear(4, 2)), level)
        model((x * 0 + 999999).as_subclass(Batch))


def test_inputs_are_read_in_the_first_call_of_each_method() -> None:
    model = quietly(Parts(lambda self, x, t: self.linear(x) + t, linear=nn.Linear(1, 1)), "O5")
    x, fine, spoilt = torch.ones(1, 1), torch.ones(1), torch.tensor([998.39])
    with pytest.warns(UserWarning, match="the input 'args'") as caught:
        for _ in range(3):
            model(x, spoilt)
    assert len(caught) == 1
    model = quietly(Parts(lambda self, x, t: self.linear(x) + t, linear=nn.Linear(1, 1)), "O5")
    model(x, fine)
    model(x, spoilt)  # a warning is an error


def test_a_tensor_in_a_container_is_named_by_its_argument() -> None:
    model = quietly(Parts(lambda self, batch: self.linear(batch["x"]), linear=nn.Linear(2, 2)))
    model.forward.__self__.names = None
    with pytest.warns(UserWarning, match=r"a tensor in it.*an argument by itself"):
        model({"x": torch.ones(1, 2), "masses": torch.tensor([1.67e-27, 9.1e-31])})


SPOILT = {
    "timesteps": (torch.tensor([998.39]), (BF16,), "every whole one only up to 256"),
    "whole numbers": (torch.tensor([2049.0, 3.0]), (F16, BF16), "every whole one"),
    "masses": (torch.tensor([1.67e-27, 9.1e-31]), (F16,), "become 0"),
    "coordinates": (torch.tensor([[431_204.5, 0.1]]), (F16,), "none beyond 65504"),
    "coordinates in bf16": (torch.tensor([[431_204.5, 0.1]]), (BF16,), "every whole one"),
}
WHOLE = {
    "images": torch.rand(1, 3, 4, 4),
    "bytes": torch.arange(256.0),
    "random": torch.randn(64, generator=torch.Generator().manual_seed(0)) * 20,
    "a mask of the lowest": masked(LOWEST),
    "a mask of -1e9": masked(-1e9),
    "an infinite mask": masked(-float("inf")),
    "probabilities": torch.rand(64, generator=torch.Generator().manual_seed(0)).softmax(0),
    "zeros": torch.zeros(4),
    "integers": torch.arange(100_000),
    "nothing": torch.empty(0),
    "nan": torch.tensor([float("nan")]),
    "small in 16 bits": torch.full((4,), 1e-20, dtype=BF16),
}


@pytest.mark.parametrize(("values", "dtypes", "words"), SPOILT.values(), ids=SPOILT)
def test_inputs_that_a_cast_spoils_are_found(values: Tensor, dtypes: tuple[torch.dtype, ...], words: str) -> None:
    for dtype in dtypes:
        found = loss_of_input(values, dtype)
        assert found is not None and words in found


@pytest.mark.parametrize("values", WHOLE.values(), ids=WHOLE)
def test_inputs_that_are_only_rounded_are_no_alarm(values: Tensor) -> None:
    assert [loss_of_input(values, dtype) for dtype in (F16, BF16)] == [None, None]


@pytest.fixture(params=CASES)
def case(request: Any) -> Iterator[Any]:
    yield CASES[request.param]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_no_alarm_on_the_inputs_of_trained_models(case: Any, level: str) -> None:
    model = quietly(case.build(), level)
    for x, _ in case.batches(4):
        model(x)  # a warning is an error
