"""Numbers over many steps: the history, exponents, weights that stall, and the report of it all."""

import math
from typing import Any

import pytest
import torch
from loops import HALVES, backward, batches, gradients, iterate, mse, plain_sgd, poison, start, started, train
from torch import nn

import mpinit


def run(level: str = "O2", dtype: torch.dtype = torch.float16, **more: Any) -> tuple[mpinit.History, list[Any]]:
    """Five steps, the third of them skipped, with what is expected of each."""
    (model, optimizer), expected = started(level, dtype), []
    with mpinit.History(optimizer, **more) as history:
        for number, batch in enumerate(batches(5)):
            optimizer.zero_grad()
            loss = mse(model, batch)
            scale = mpinit.loss_scale(optimizer)
            backward(poison(loss, model[0].weight) if number == 2 else loss, optimizer)
            norm = torch.nn.utils.get_total_norm(gradients(optimizer))
            mpinit.clip_grad_norm_(optimizer, 0.01)
            optimizer.step()
            expected.append((loss.item(), scale, mpinit.step_was_skipped(optimizer), norm.item()))
    return history, expected


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_rows_hold_what_happened(level: str, dtype: torch.dtype) -> None:
    history, expected = run(level, dtype)
    rows = history.rows()
    assert len(history) == len(rows) == 5
    for number, (row, (loss, scale, skipped, norm)) in enumerate(zip(rows, expected, strict=True), 1):
        assert (row["step"], row["scale"], row["skipped"]) == (number, scale, skipped)
        assert row["loss"] == pytest.approx(loss, rel=1e-6)
        assert row["gradient_norm"] == pytest.approx(norm, nan_ok=True)
    assert [row["skipped"] for row in rows] == [False, False, True, False, False]


def test_the_oldest_go() -> None:
    assert [row["step"] for row in run(capacity=2)[0].rows()] == [4, 5]


def test_two_losses_of_one_step_are_averaged_and_a_step_without_any_is_nan() -> None:
    model, optimizer = started()
    history = mpinit.History(optimizer)
    losses = [mse(model, batch) for batch in batches(2)]
    for loss in losses:
        backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    first, second = history.rows()
    assert first["loss"] == pytest.approx(sum(loss.item() for loss in losses) / 2, rel=1e-6)
    assert math.isnan(second["loss"])
    history.close()
    history.close()
    optimizer.step()
    assert len(history) == 2


@pytest.mark.parametrize("capacity", [0, -1, True, 2.5])
def test_bad_capacities(capacity: Any) -> None:
    with pytest.raises(ValueError, match="from 1 up"):
        mpinit.History(started()[1], capacity)


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


def sgd(lr: float, level: str, **more: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    return started(level, torch.bfloat16, lambda p: torch.optim.SGD(p, lr=lr), **more)


def measure(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> Any:
    assert mpinit.stalled(optimizer, start=True) is None
    train(model, optimizer, batches(1) * steps)
    return mpinit.stalled(optimizer)


@pytest.mark.parametrize(
    ("level", "more", "stalls"), [("O3", {}, True), ("O5", {}, False), ("O5", {"master_weights": "split"}, False)]
)
def test_plain_bfloat16_stalls_and_masters_do_not(level: str, more: dict[str, Any], stalls: bool) -> None:
    model, optimizer = sgd(1e-5, level, **more)
    share = measure(model, optimizer)["0.weight"]
    assert ("master_weights=True" in mpinit.audit(model, optimizer).advice) == stalls
    assert share > 0.8 if stalls else share < 0.1


def test_the_share_is_that_of_elements_with_a_gradient_that_are_what_they_were() -> None:
    model, optimizer = sgd(1e-3, "O3")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = measure(model, optimizer, steps=1)
    for name, parameter in model.named_parameters():
        meant = parameter.grad != 0
        share = float((parameter == before[name])[meant].double().mean())
        assert result[name] == pytest.approx(share)
    assert list(result.values()) == sorted(result.values(), reverse=True)


def test_rows_of_an_embedding_without_a_gradient_do_not_count() -> None:
    model = nn.Embedding(10, 4)
    optimizer = start(model, make=plain_sgd)
    mpinit.stalled(optimizer, start=True)
    iterate(model(torch.tensor([1, 2])).square().sum(), optimizer)
    assert mpinit.stalled(optimizer) == {"weight": 0.0}


def test_skipped_steps_do_not_count() -> None:
    (model, optimizer), batch = started(), batches(1)[0]
    mpinit.stalled(optimizer, start=True)
    iterate(poison(mse(model, batch), model[0].weight), optimizer)
    with pytest.raises(RuntimeError, match="no step was done"):
        mpinit.stalled(optimizer)
    iterate(mse(model, batch), optimizer)
    result = mpinit.stalled(optimizer)
    assert result is not None and max(result.values()) == 0.0


def test_float32_that_stalls_is_not_blamed_on_precision() -> None:
    model, optimizer = sgd(1e-12, "O0")
    assert measure(model, optimizer)["0.weight"] > 0.9
    assert mpinit.audit(model, optimizer).advice.endswith("stay as they are: raise the learning rate")


def test_it_has_to_be_started() -> None:
    with pytest.raises(RuntimeError, match="start=True"):
        mpinit.stalled(started()[1])
    with pytest.raises(RuntimeError, match="was not initialised"):
        mpinit.stalled(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), start=True)


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
