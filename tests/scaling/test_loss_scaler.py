"""The loss scaler alone: its rule, its limits, its state.

Below the public face: the scaler is updated with chosen results of checks, without a backward pass.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import backward, batches, iterate, mlp, momentum, mse, start
from torch import nn

import mpinit
from mpinit import registry
from mpinit.config.loss_scale import DynamicLossScale, LossScale
from mpinit.scaling.scaler import LossScaler, check_state

pytestmark = pytest.mark.device

RULE = DynamicLossScale(growth_interval=3)


def first_of(rule: LossScale) -> float:
    return rule.init if isinstance(rule, DynamicLossScale) else rule


def scales(rule: LossScale, outcomes: str) -> list[float]:
    """The scale after each update; "." is a good step, "x" an overflow."""
    scaler, seen = LossScaler(rule), []
    for outcome in outcomes:
        scaler.record_found_inf(torch.tensor(float(outcome == "x")))
        scaler.update()
        seen.append(scaler.loss_scale() / first_of(rule))
    return seen


@pytest.mark.parametrize(
    ("changes", "outcomes", "expected"),
    [
        ({}, "......", [1, 1, 2, 2, 2, 4]),
        ({}, "..x...", [1, 1, 0.5, 0.5, 0.5, 1]),
        ({}, "xxx", [0.5, 0.25, 0.125]),
        ({"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 1}, ".x", [4, 1]),
        ({"max": 2.0**17}, ".........", [1, 1, 2, 2, 2, 2, 2, 2, 2]),
        ({"min": 2.0**15}, "xxxx", [0.5, 0.5, 0.5, 0.5]),
        ({"hysteresis": 2}, "xx", [1, 0.5]),
        # Once exhausted, hysteresis stays so until the scale grows; a tolerated overflow ends the run of good steps.
        ({"hysteresis": 2}, "xxx...xx", [1, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5, 0.25]),
        ({"hysteresis": 2}, "..x...", [1, 1, 1, 1, 1, 2]),
    ],
)
def test_the_scale_moves_by_the_rule(changes: dict[str, Any], outcomes: str, expected: list[float]) -> None:
    assert scales(replace(RULE, **changes), outcomes) == expected
    assert scales(128.0, outcomes) == [1] * len(outcomes)


def by_docstring(rule: DynamicLossScale, outcomes: str) -> list[float]:
    """The algorithm as the docstring of DynamicLossScale has it."""
    scale, good, tolerance, seen = rule.init, 0, rule.hysteresis, []
    for outcome in outcomes:
        if outcome == "x":
            good, tolerance = 0, max(tolerance - 1, 0)
            if tolerance == 0:
                scale *= rule.backoff_factor
        else:
            good += 1
            if good == rule.growth_interval:
                scale, good, tolerance = scale * rule.growth_factor, 0, rule.hysteresis
        scale = min(max(scale, rule.lowest), rule.max)
        seen.append(scale / rule.init)
    return seen


@given(
    st.text(".x", max_size=60),
    st.builds(
        DynamicLossScale,
        growth_interval=st.integers(1, 5),
        hysteresis=st.integers(1, 4),
        growth_factor=st.sampled_from([2.0, 4.0]),
        backoff_factor=st.sampled_from([0.5, 0.125]),
        min=st.sampled_from([None, 2.0**10]),
        max=st.sampled_from([2.0**18, 2.0**24]),
    ),
)
def test_the_docstring_is_the_algorithm(outcomes: str, rule: DynamicLossScale) -> None:
    assert scales(rule, outcomes) == by_docstring(rule, outcomes)


@pytest.mark.parametrize("outcome", ["x", "."])
def test_the_scale_never_becomes_0_inf_or_nan(outcome: str) -> None:
    rule = replace(RULE, growth_interval=1, max=2.0**126)
    for scale in scales(rule, outcome * 400):
        assert math.isfinite(scale) and scale > 0
        assert math.isfinite(1 / (scale * rule.init))


def test_several_checks_make_one_update() -> None:
    scaler = LossScaler(RULE)
    for found_inf in (0.0, 1.0, 0.0):
        scaler.record_found_inf(torch.tensor(found_inf))
    scaler.update()
    scaler.update()
    assert scaler.loss_scale() == 2.0**15 and scaler.unskipped == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_loss_is_scaled_in_float32_or_better(dtype: torch.dtype) -> None:
    loss = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    for rule in (RULE, 1.0):
        scaled = LossScaler(rule).scale(loss)
        assert scaled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert scaled.item() == 3.0 * first_of(rule)


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_saved_scaler_resumes(hysteresis: int) -> None:
    rule, outcomes = replace(RULE, hysteresis=hysteresis), "..x..xx....x..."
    whole = scales(rule, outcomes)
    for cut in range(1, len(outcomes)):
        scaler, resumed = LossScaler(rule), LossScaler(rule)
        for outcome in outcomes[:cut]:
            scaler.record_found_inf(torch.tensor(float(outcome == "x")))
            scaler.update()
        state = scaler.state_dict()
        assert check_state(state) == [] and all(isinstance(value, (int, float)) for value in state.values())
        resumed.load_state_dict(state)
        for outcome, expected in zip(outcomes[cut:], whole[cut:], strict=True):
            resumed.record_found_inf(torch.tensor(float(outcome == "x")))
            resumed.update()
            assert resumed.loss_scale() == expected * rule.init


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1e300, 2.0**127, 1e-60])
def test_a_scale_that_cannot_be_undone_is_refused(scale: float) -> None:
    scaler = LossScaler(RULE)
    with pytest.raises(ValueError, match="between"):
        scaler.set_scale(scale)
    assert check_state({"loss_scale": scale, "unskipped": 0})
    assert scaler.loss_scale() == 2.0**16


def test_the_rule_that_is_passed_moves_the_scale() -> None:
    rule = DynamicLossScale(init=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2, min=1.0, max=64.0)
    model = mlp()
    optimizer = start(model, "O2", loss_scale=rule)
    seen = []
    for bad in (0, 0, 0, 0, 0, 0, 1, 1, 1, 1):
        iterate(mse(model, batches(1)[0]) * (float("inf") if bad else 1.0), optimizer)
        seen.append(mpinit.loss_scale(optimizer))
    assert seen == [8, 32, 32, 64, 64, 64, 16, 4, 1, 1]


def test_the_defaults_are_the_documented_ones() -> None:
    model = mlp()
    optimizer = momentum(model.parameters())
    mpinit.initialize(model, optimizer, opt_level="O2")
    session = registry.of(optimizer)
    assert session is not None
    assert session.plan.loss_scale == DynamicLossScale(2.0**16, 2.0, 0.5, 2000, 1, None, 2.0**24, 64)


BAD_VALUES: list[tuple[str, Any]] = [
    *(("loss_scale", value) for value in (1e300, 1e-60, 2.0**127, 10**60, "x", None, True, -1.0, 0, [8.0], {})),
    *(("unskipped", value) for value in (2**31, 2**40, -1, "x", None, True, 1.5)),
    *(("tolerance", value) for value in (2**31, -1, "x", None, True, 1.5)),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_a_bad_state_is_refused_whole(key: str, value: Any) -> None:
    scaler = LossScaler(replace(RULE, hysteresis=3))
    before = scaler.state_dict()
    bad = {"loss_scale": 8.0, "unskipped": 1, "tolerance": 2} | {key: value}
    assert len(check_state(bad)) == 1 and f"{key}={value!r}" in check_state(bad)[0]
    with pytest.raises(ValueError, match="nothing was loaded"):
        scaler.load_state_dict(bad)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(("key", "value"), [("scale", "x"), ("scale", 1e300), ("_growth_tracker", 2**40)])
def test_bad_state_of_a_grad_scaler_is_refused_in_the_same_words(key: str, value: Any) -> None:
    optimizer = start(mlp(), "O2")
    before = mpinit.state_dict(optimizer)
    with pytest.raises(ValueError, match="nothing was loaded: loss_scaler0 has"):
        mpinit.load_state_dict(torch.amp.GradScaler("cpu").state_dict() | {key: value}, optimizer)
    assert mpinit.state_dict(optimizer) == before


@pytest.mark.parametrize(("level", "more", "own"), [("O5", {}, 1), ("O2", {"loss_scale": 128.0}, 128), ("O3", {}, 1)])
def test_static_scale_never_changes(
    level: str, more: dict[str, Any], own: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    optimizer = momentum(model.parameters())
    mpinit.initialize(model, optimizer, level, **more)
    with caplog.at_level("INFO", "mpinit"):
        mpinit.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 12}}, optimizer)
    assert mpinit.loss_scale(optimizer) == own
    assert "saved loss scale 65536.0 is not used" in caplog.text and "static" in caplog.text
    with mpinit.scale_loss(mse(model, batches(1)[0]).detach().requires_grad_(), optimizer) as scaled:
        assert scaled.item() == pytest.approx(own * mse(model, batches(1)[0]).item())
        scaled.backward()


def test_saved_scale_is_clamped_to_the_limits() -> None:
    scaler = LossScaler(replace(RULE, max=2.0**10, init=8.0))
    scaler.load_state_dict({"loss_scale": 2.0**16, "unskipped": 2})
    assert scaler.state_dict() == {"loss_scale": 2.0**10, "unskipped": 0}


def test_count_of_a_longer_interval_lets_the_scale_grow() -> None:
    scaler = LossScaler(RULE)
    scaler.load_state_dict({"loss_scale": 8.0, "unskipped": 1999})
    scaler.record_found_inf(torch.tensor(0.0))
    scaler.update()
    assert scaler.loss_scale() == 16.0
    scaler.unskipped = 2
    scaler.rule = replace(RULE, growth_interval=1)
    scaler.record_found_inf(torch.tensor(0.0))
    scaler.update()
    assert scaler.loss_scale() == 32.0


@pytest.mark.parametrize(("level", "scale"), [("O2", DynamicLossScale(hysteresis=2)), ("O3", None), ("O5", None)])
def test_a_session_made_where_the_default_device_is_meta_trains(level: str, scale: Any) -> None:
    results = []
    for device in ("meta", "cpu"):
        model, batch = mlp(), batches(1)[0]
        optimizer = momentum(model.parameters())
        with torch.device(device):
            mpinit.initialize(model, optimizer, level, loss_scale=scale)
            for _ in range(2):
                backward(mse(model, batch), optimizer)
                optimizer.step()
                optimizer.zero_grad()
            state = mpinit.state_dict(optimizer)
            mpinit.load_state_dict(state, optimizer)
        results.append((state, [value.clone() for value in model.state_dict().values()]))
    assert results[0][0] == results[1][0]
    for on_meta, on_cpu in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(on_meta, on_cpu)


def test_loss_on_the_meta_device_keeps_the_state() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O2", loss_scale=DynamicLossScale(init=1024.0))
    for device in ("meta", "cpu", "meta", "cpu"):
        loss = torch.ones((), device="meta", requires_grad=True) if device == "meta" else model(torch.ones(1, 3)).sum()
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if device == "cpu":
            assert torch.equal(next(mpinit.master_params(optimizer)).grad, torch.ones(2, 3))
            optimizer.step()
            optimizer.zero_grad()
    assert (mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer)) == (1024.0, (2, 0))
