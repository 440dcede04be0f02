"""History: what it tells of each step, against numbers by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loops import HALVES, backward, batches, mlp, mse, poison, start

import mpinit


def run(level: str = "O2", dtype: torch.dtype = torch.float16, **more: Any) -> tuple[mpinit.History, list[Any]]:
    """Five steps, the third of them skipped, with what is expected of each."""
    model = mlp()
    optimizer = start(model, level, dtype)
    expected = []
    with mpinit.History(optimizer, **more) as history:
        for number, batch in enumerate(batches(5)):
            optimizer.zero_grad()
            loss = mse(model, batch)
            scale = mpinit.loss_scale(optimizer)
            backward(poison(loss, model[0].weight) if number == 2 else loss, optimizer)
            norm = torch.nn.utils.get_total_norm([p.grad for p in mpinit.master_params(optimizer)])  # type: ignore[misc]
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
    model, (one, two) = mlp(), batches(2)
    optimizer = start(model, "O2")
    history = mpinit.History(optimizer)
    losses = [mse(model, one), mse(model, two)]
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
        mpinit.History(start(mlp(), "O2"), capacity)
