"""Writes to gradients between ``scale_loss`` and the step: with ``skip_nonfinite=True`` the step checks them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import backward, batches, masters, mse, same, started
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import mpinit

pytestmark = pytest.mark.device

BATCH = batches(1)[0]
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"level": "O0"},
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
    "O2, static": {"level": "O2", "loss_scale": 128.0},
    "O5": {"level": "O5"},
    "O5, dynamic": {"level": "O5", "loss_scale": "dynamic"},
    "split, dynamic": {"level": "O5", "loss_scale": "dynamic", "master_weights": "split"},
}
NAN = float("nan")


def in_place(gradient: torch.Tensor, parameter: nn.Parameter, bad: float) -> None:
    gradient.view(-1)[-1] = bad


def through_data(gradient: torch.Tensor, parameter: nn.Parameter, bad: float) -> None:
    gradient.data.view(-1)[-1] = bad


def replaced(gradient: torch.Tensor, parameter: nn.Parameter, bad: float) -> None:
    parameter.grad = gradient * bad


def penalty(gradient: torch.Tensor, parameter: nn.Parameter, bad: float) -> None:
    gradient.add_(parameter.detach(), alpha=bad)


WRITES: dict[str, Callable[[torch.Tensor, nn.Parameter, float], None]] = {
    each.__name__: each for each in (in_place, through_data, replaced, penalty)
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "fused": lambda p: AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_written_after_the_block_is_not_stepped(level: str, write: str, make: str) -> None:
    model, optimizer = started(make=OPTIMIZERS[make], skip_nonfinite=True, **LEVELS[level])
    backward(mse(model, BATCH), optimizer)
    optimizer.step()
    before, scale = masters(optimizer), mpinit.loss_scale(optimizer)
    optimizer.zero_grad()
    backward(mse(model, BATCH), optimizer)
    last = model[3].weight
    WRITES[write](last.grad, last, float("inf") if write == "in_place" else NAN)
    optimizer.step()
    assert mpinit.step_was_skipped(optimizer) and mpinit.step_counts(optimizer) == (1, 1)
    same(masters(optimizer), before)
    assert mpinit.loss_scale(optimizer) == scale, "the scale is not at fault"
    report = mpinit.overflow_report(optimizer)
    assert report is not None and report.parameters == ("3.weight",)
    optimizer.zero_grad()
    backward(mse(model, BATCH), optimizer)
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (2, 1)


@pytest.mark.filterwarnings("ignore:optimizer.step.. uses gradients that did not come through")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_plain_gradients_are_checked_with_a_dynamic_scale_too(level: str) -> None:
    model, optimizer = started(level)
    before = masters(optimizer)
    (mse(model, BATCH) * float("nan")).backward()
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (0, 1)
    same(masters(optimizer), before)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_finite_writes_are_stepped(level: str) -> None:
    ends = []
    for factor in (0.5, 1.0):
        model, optimizer = started(level, make=lambda p: SGD(p, lr=0.1))
        backward(mse(model, BATCH) / (factor * 2), optimizer)
        for parameter in model.parameters():
            parameter.grad.mul_(factor)  # type: ignore[union-attr]
        optimizer.step()
        assert mpinit.step_counts(optimizer) == (1, 0)
        ends.append(masters(optimizer))
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-5)
