"""Clipping, hooks and gradients taken by hand: the numbers are those of float32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loops import HALVES, backward, batches, gradients, masters, mlp, mse, plain_sgd, poison, same, start
from torch import nn
from torch.optim import Optimizer

import mpinit

pytestmark = pytest.mark.device

LEVELS = ("O0", "O1", "O2", "O3")


def by_torch(model: nn.Module, optimizer: Optimizer, limit: float, **more: Any) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(mpinit.master_params(optimizer), limit, **more)


def by_mpinit(model: nn.Module, optimizer: Optimizer, limit: float, **more: Any) -> torch.Tensor:
    return mpinit.clip_grad_norm_(optimizer, limit, **more)


def by_the_models_parameters(model: nn.Module, optimizer: Optimizer, limit: float, **more: Any) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), limit, **more)


WAYS = (by_torch, by_mpinit, by_the_models_parameters)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", LEVELS)
def test_clipping_equals_float32s(level: str, way: Any, norm_type: float) -> None:
    model, reference, data = mlp(), mlp(), batches(2)
    optimizer = start(model, level, make=plain_sgd)
    for batch in data:
        backward(mse(model, batch), optimizer)
        mse(reference, batch).backward()
    norm = way(model, optimizer, 0.1, norm_type=norm_type)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type=norm_type)
    torch.testing.assert_close(norm.float(), expected, rtol=0.01, atol=0.0)
    for got, parameter in zip(gradients(optimizer), reference.parameters(), strict=True):
        assert got is not None
        exact = {"rtol": 0.0, "atol": 0.0} if level == "O0" else {"rtol": 0.02, "atol": 2e-4}
        torch.testing.assert_close(got.float(), parameter.grad, **exact)
    before = masters(optimizer)
    optimizer.step()
    for old, new, parameter in zip(before, masters(optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close((old - new).float(), parameter.grad, rtol=0.02, atol=5e-4)


def by_value(model: nn.Module, optimizer: Optimizer, limit: float) -> None:
    torch.nn.utils.clip_grad_value_(mpinit.master_params(optimizer), limit)


@pytest.mark.parametrize("way", [*WAYS, by_value])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_clipping_after_an_overflow_leaves_the_step_skipped(level: str, way: Any) -> None:
    model, batch = mlp(), batches(1)[0]
    optimizer = start(model, level, loss_scale="dynamic", init_loss_scale=4.0)
    before = masters(optimizer)
    backward(poison(mse(model, batch), next(model.parameters())), optimizer)
    norm = way(model, optimizer, 0.1)
    assert norm is None or not norm.isfinite()
    optimizer.step()
    assert mpinit.step_was_skipped(optimizer)
    same(masters(optimizer), before)
    if way is by_value:
        # What is left is finite, and counts with the next loss, as with torch.amp.GradScaler.
        backward(mse(model, batch), optimizer)
        optimizer.step()
        assert mpinit.step_counts(optimizer) == (1, 1)


def test_error_if_nonfinite_is_handed_on() -> None:
    model = mlp()
    optimizer = start(model)
    backward(poison(mse(model, batches(1)[0]), next(model.parameters())), optimizer)
    with pytest.raises(RuntimeError, match="non-finite"):
        mpinit.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("way", [by_torch, by_mpinit])
def test_clipping_without_gradients_is_harmless(way: Any) -> None:
    model = mlp()
    assert way(model, start(model), 1.0).item() == 0.0


# -- hooks and gradients taken by hand ------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_gradient_hooks_see_and_change_the_gradient(level: str) -> None:
    model, reference, batch = mlp(), mlp(), batches(1)[0]
    optimizer = start(model, level)
    for net in (model, reference):
        net[0].weight.register_hook(lambda gradient: gradient * 2)
    calls: list[torch.Tensor] = []
    model[3].weight.register_post_accumulate_grad_hook(calls.append)
    backward(mse(model, batch), optimizer)
    mse(reference, batch).backward()
    assert len(calls) == 1 and calls[0] is model[3].weight
    for got, parameter in zip(gradients(optimizer), reference.parameters(), strict=True):
        assert got is not None
        torch.testing.assert_close(got.float(), parameter.grad, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_the_scaled_loss_by_hand(level: str, dtype: torch.dtype) -> None:
    model, reference, batch = mlp(), mlp(), batches(1)[0]
    optimizer = start(model, level, dtype)
    wanted = torch.autograd.grad(mse(reference, batch), list(reference.parameters()))
    with mpinit.scale_loss(mse(model, batch), optimizer) as scaled:
        found = torch.autograd.grad(scaled, list(model.parameters()))
        scale = mpinit.loss_scale(optimizer)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.float() / scale, expected, rtol=0.05, atol=0.01)
    assert all(gradient is None for gradient in gradients(optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_backward_may_name_its_inputs(level: str) -> None:
    model, batch = mlp(), batches(1)[0]
    optimizer = start(model, level)
    with mpinit.scale_loss(mse(model, batch), optimizer) as scaled:
        scaled.backward(inputs=list(model[3].parameters()))
    assert [gradient is None for gradient in gradients(optimizer)] == [True, True, False, False]
