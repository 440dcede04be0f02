"""mpinit.GradScaler: gradients that it has scaled never reach a step."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from loops import backward, batches, gradients, mlp, mse, plain_sgd, poison, same
from scaler_loops import SCALED, begin, each_scaled, gradients_of
from torch import nn

import mpinit


@each_scaled
def test_a_step_of_the_optimizer_itself_is_refused(setting: str) -> None:
    model, optimizer, scaler = begin(setting)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(mse(model, batches(1)[0])).backward()
    for call in (
        optimizer.step,
        lambda: list(mpinit.master_params(optimizer)),
        lambda: mpinit.clip_grad_norm_(optimizer, 1.0),
        lambda: mpinit.scale_loss(mse(model, batches(1)[0]), optimizer).__enter__(),
    ):
        with pytest.raises(RuntimeError, match=r"still scaled, by a GradScaler: call scaler\.step\(optimizer\)"):
            call()
    same(before.values(), model.state_dict().values())
    scaler.unscale_(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    scaler.update()
    scaler.scale(mse(model, batches(1)[0])).backward()
    model.zero_grad()
    backward(mse(model, batches(1)[0]), optimizer)
    optimizer.step()


@each_scaled
@pytest.mark.parametrize("clears", ["optimizer", "model", "masters", "zeros"])
def test_cleared_gradients_are_gone(setting: str, clears: str) -> None:
    expected = gradients_of(setting)
    model, optimizer, scaler = begin(setting)
    for _ in range(2):
        scaler.scale(poison(mse(model, batches(1, seed=7)[0]), model[0].weight)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert mpinit.step_was_skipped(optimizer)
        clear(model, optimizer, clears)
    scaler.scale(mse(model, batches(1, seed=8)[0])).backward()
    clear(model, optimizer, clears)
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.unscale_(optimizer)
    if setting not in ("O3", "O2", "split"):
        same([p.grad for p in model.parameters()], expected)
    torch.testing.assert_close(
        [p.grad.float() for p in model.parameters()], [g.float() for g in expected if g is not None]
    )
    scaler.step(optimizer)
    assert not mpinit.step_was_skipped(optimizer)
    assert mpinit.step_counts(optimizer) == (1, 2)


def clear(model: nn.Module, optimizer: Any, how: str) -> None:
    if how == "model":
        model.zero_grad()
    elif how == "masters":
        torch.optim.Optimizer.zero_grad(optimizer)
    else:
        optimizer.zero_grad(set_to_none=how == "optimizer")


@each_scaled
def test_gradients_from_before_count_as_they_are(setting: str) -> None:
    """Left by scale_loss, by an earlier step, or assigned: where a scaled pass adds to them they add up."""
    expected = gradients_of(setting)
    model, optimizer, scaler = begin(setting)
    backward(mse(model, batches(1)[0]), optimizer)
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.unscale_(optimizer)
    twice = [g * 2 for g in expected if g is not None]
    same(gradients(optimizer), twice)
    scaler.update(8.0)
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(gradients(optimizer), [g * 3 for g in expected if g is not None], rtol=0.01, atol=0)


@each_scaled
def test_what_a_scaled_pass_does_not_reach_stays_as_it_is(setting: str) -> None:
    model, optimizer, scaler = begin(setting)
    backward(mse(model, batches(1)[0]), optimizer)
    before, scaled = gradients(optimizer), scaler.scale(mse(model, batches(1)[0]))
    torch.autograd.grad(scaled, list(model.parameters()), retain_graph=True)
    same(gradients(optimizer), before)
    scaled.backward(inputs=[model[0].weight])
    scaler.unscale_(optimizer)
    same(gradients(optimizer), [before[0] * 2, *before[1:]])  # type: ignore[operator]


@each_scaled
def test_a_backward_pass_after_unscaling_is_unscaled_by_the_step(setting: str) -> None:
    expected = gradients_of(setting)
    model, optimizer, scaler = begin(setting)
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.unscale_(optimizer)
    scaler.scale(mse(model, batches(1)[0])).backward()
    before = copy.deepcopy(model.state_dict())
    scaler.step(optimizer)
    after = model.state_dict()
    moved = [before[name] - after[name] for name in before]
    torch.testing.assert_close(moved, [g.float() * 2 for g in expected if g is not None], rtol=0.02, atol=0.001)


def test_a_weight_in_two_optimizers_is_unscaled_once() -> None:
    expected = gradients_of("O2")
    model = mlp()
    optimizers = [plain_sgd(model.parameters()), plain_sgd(model[0].parameters())]
    mpinit.initialize(model, optimizers, **SCALED["O2"])
    scaler = mpinit.GradScaler(optimizers)
    scaler.scale(mse(model, batches(1)[0])).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    same([p.grad for p in model.parameters()], expected)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


@each_scaled
def test_assigned_gradients_are_taken_for_scaled(setting: str) -> None:
    expected = gradients_of(setting)
    model, optimizer, scaler = begin(setting)
    parameters = list(model.parameters())
    for _ in range(2):
        scaled = torch.autograd.grad(scaler.scale(mse(model, batches(1)[0])), parameters)
        for parameter, gradient in zip(parameters, scaled, strict=True):
            parameter.grad = gradient
        scaler.unscale_(optimizer)
        torch.testing.assert_close(gradients(optimizer), [g for g in expected if g is not None], rtol=0.02, atol=0.001)
        scaler.update(8.0)


@pytest.mark.parametrize("setting", ["O2", "split"])
def test_a_loss_that_was_not_scaled_is_noticed(setting: str) -> None:
    model, optimizer, scaler = begin(setting)
    scaler.scale(torch.ones(()))
    mse(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"'0\.weight' has a gradient of a loss that was not scaled"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    backward(mse(model, batches(1)[0]), optimizer)
    with pytest.raises(RuntimeError, match=r"came through mpinit\.scale_loss are unscaled already"):
        scaler.step(optimizer)


def test_a_scaled_loss_in_a_scale_loss_block() -> None:
    model, optimizer, scaler = begin()
    loss = mse(model, batches(1)[0])
    with (
        pytest.raises(RuntimeError, match="use the one or the other"),
        mpinit.scale_loss(loss, optimizer) as scaled_loss,
    ):
        scaler.scale(scaled_loss).backward()


def test_weights_of_no_optimizer_keep_their_mark() -> None:
    model = mlp()
    first = mpinit.initialize(model, plain_sgd(model[0].parameters()), **SCALED["O2"])[1]
    scaler = mpinit.GradScaler(first)
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.step(first)
    second = mpinit.add_optimizers(plain_sgd(model[-1].parameters()))
    with pytest.raises(RuntimeError, match="is scaled: the loss of another optimizer"):
        second.step()
    second.zero_grad()
    scaler.update()
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.step(second)


def test_unscaled_gradients_are_not_kept_alive() -> None:
    model, optimizer, scaler = begin()
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.step(optimizer)
    known = weakref.ref(model[0].weight.grad)
    optimizer.zero_grad()
    gc.collect()
    assert known() is None
