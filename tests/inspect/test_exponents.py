"""Exponents of gradients, and what describe tells."""

import math

import pytest
import torch
from loops import backward, batches, iterate, mse, start, started
from torch import nn

import mpinit


def given(values: torch.Tensor, level: str = "O5") -> torch.optim.Optimizer:
    """An optimizer whose one parameter has these gradients, exactly."""
    model = nn.Linear(len(values), 1, bias=False)
    optimizer = start(model, level)
    backward(model(torch.zeros(1, len(values))).sum(), optimizer)
    next(iter(mpinit.master_params(optimizer))).grad.copy_(values[None])  # type: ignore[union-attr]
    optimizer.model = model  # type: ignore[attr-defined]
    return optimizer


def test_bins_are_powers_of_two() -> None:
    values = torch.tensor([1.0, 1.99, -2.0, 2.0**-24, 2.0**-149, 0.0, float("inf"), float("nan")])
    histogram = mpinit.gradient_histogram(given(values, "O0"))
    assert dict(histogram.bins) == {1: 1, 0: 2, -24: 1, -149: 1}
    assert histogram.zeros == {"weight": 1}
    assert str(histogram).startswith("6 gradients, 1 of them 0"), "inf and nan are not counted"


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize(("dtype", "edges"), [(torch.float16, (-24, -14, 16)), (torch.bfloat16, (-133, -126, 128))])
def test_the_shares_are_those_that_casts_lose(dtype: torch.dtype, edges: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(1)
    values = torch.randn(2000) * torch.exp2(torch.randint(-40, 18, (2000,)).float())
    histogram = mpinit.gradient_histogram(given(values, "O0"))
    gone, digits, end = (edge - math.log2(scale) for edge in edges)
    cast = (values * scale).to(dtype).abs().double()
    tiny = torch.finfo(dtype).tiny
    # A cast rounds: what is between half the smallest number and that becomes the smallest.
    assert histogram.share(high=gone) == pytest.approx(float((cast == 0).double().mean()), abs=0.02)
    assert histogram.share(high=digits) == pytest.approx(float((cast < tiny).double().mean()), abs=0.002)
    assert histogram.share(low=end) == pytest.approx(float(cast.isinf().double().mean()), abs=0.002)


def test_the_scale_it_suggests_keeps_the_largest_in_range() -> None:
    values = torch.tensor([3e-9, 1e-12, 5e-7])
    suggested = mpinit.gradient_histogram(given(values)).suggested_scale
    assert suggested is not None and math.log2(suggested).is_integer()
    assert 65504 / 16 < 5e-7 * suggested < 65504 or suggested == 2.0**24
    assert mpinit.gradient_histogram(given(torch.zeros(3))).suggested_scale is None


def test_parameters_are_told_apart_and_unscaled() -> None:
    model, optimizer = started()
    backward(mse(model, batches(1)[0]), optimizer)
    histogram = mpinit.gradient_histogram(optimizer)
    assert histogram.per_parameter.keys() == dict(model.named_parameters()).keys()
    assert histogram.scale == 1024.0
    count = sum(histogram.bins.values()) + sum(histogram.zeros.values())
    assert count == sum(p.numel() for p in model.parameters())
    for name, parameter in zip(histogram.per_parameter, mpinit.master_params(optimizer), strict=True):
        exponents = torch.frexp(parameter.grad[parameter.grad != 0]).exponent - 1  # type: ignore[index, union-attr]
        assert max(histogram.per_parameter[name]) == int(exponents.max())
    assert "become 0" in str(histogram)


def test_what_it_refuses() -> None:
    with pytest.raises(RuntimeError, match="after scale_loss"):
        mpinit.gradient_histogram(started()[1])


@pytest.mark.parametrize("name", ["History", "stalled"])
def test_what_there_was_says_what_takes_its_place(name: str) -> None:
    with pytest.raises(AttributeError, match=f"mpinit.{name} was removed: .*(tracker|audit)"):
        getattr(mpinit, name)


def test_it_tells_level_dtypes_masters_scale_and_skips() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = start(model, make=torch.optim.Adam)
    for factor in (1.0, float("inf")):
        iterate(model(torch.randn(3, 4)).square().mean() * 0.01 * factor, optimizer)
    text = mpinit.describe(optimizer)
    assert text == mpinit.describe(model)
    for part in (
        "(O2: Sequential; Adam)",
        "cast_model_type = torch.float16",
        "Adam: 1 step done, 1 skipped, 1 of them in a row just now",
        "scale 512, 0 good backward passes since it moved",
    ):
        assert part in text


def test_what_is_not_initialised_or_disabled() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="was not initialised"):
        mpinit.describe(model)
    mpinit.initialize(model, enabled=False)
    assert mpinit.describe(model) == "mixed precision is disabled"
