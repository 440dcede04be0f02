"""Clipping, hooks and gradients taken by hand: the numbers are those of float32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loops import HALVES, backward, batches, gradients, masters, mlp, mse, plain_sgd, poison, same, start, train_plainly
from torch import nn
from torch.optim import SGD, Optimizer

import mpinit

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
        torch.testing.assert_close(got.float(), parameter.grad, rtol=0.02, atol=2e-4)
    before = masters(optimizer)
    optimizer.step()
    for old, new, parameter in zip(before, masters(optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close((old - new).float(), parameter.grad, rtol=0.02, atol=5e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_after_an_overflow_leaves_the_step_skipped(level: str, way: Any) -> None:
    model = mlp()
    optimizer = start(model, level)
    before = masters(optimizer)
    backward(poison(mse(model, batches(1)[0]), next(model.parameters())), optimizer)
    assert not way(model, optimizer, 0.1).isfinite()
    optimizer.step()
    assert mpinit.step_was_skipped(optimizer)
    same(masters(optimizer), before)


def test_split_masters_clip_what_carries_the_gradients() -> None:
    model, reference, batch = mlp(), mlp(), batches(1)[0]
    optimizer = start(model, "O2", torch.bfloat16, plain_sgd, master_weights="split")
    backward(mse(model, batch), optimizer)
    mse(reference, batch).backward()
    assert list(mpinit.master_params(optimizer)) == list(model.parameters())
    norm = mpinit.clip_grad_norm_(optimizer, 0.1)
    torch.testing.assert_close(
        norm.float(), torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1), rtol=0.01, atol=0
    )
    old = [value.clone() for value in model.state_dict().values()]
    optimizer.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(old, model.state_dict().values(), strict=True)])
    assert abs(moved.norm().item() - 0.1) < 0.001


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


@pytest.mark.parametrize("level", LEVELS)
def test_clip_grad_value_is_right_at_every_level(level: str) -> None:
    model, reference, batch = mlp(), mlp(), batches(1)[0]
    optimizer = start(model, level)
    backward(mse(model, batch), optimizer)
    mse(reference, batch).backward()
    torch.nn.utils.clip_grad_value_(mpinit.master_params(optimizer), 0.01)
    torch.nn.utils.clip_grad_value_(reference.parameters(), 0.01)
    for got, parameter in zip(gradients(optimizer), reference.parameters(), strict=True):
        assert got is not None
        torch.testing.assert_close(got.float(), parameter.grad, rtol=0.02, atol=5e-4)


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


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_gradients_put_on_the_weights_by_hand_are_used(level: str) -> None:
    model, batch = mlp(), batches(1)[0]
    optimizer = start(model, level, make=plain_sgd)
    backward(mse(model, batch), optimizer)
    before = masters(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, 0.5)
    optimizer.step()
    same(masters(optimizer), [value - 0.5 for value in before])


def test_a_clipped_loop_at_o0_is_plain_torchs_bit_for_bit() -> None:
    model, reference, data = mlp(), mlp(), batches(5)
    optimizer, plain = start(model, "O0"), SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for batch in data:
        for net, opt in ((model, optimizer), (reference, plain)):
            opt.zero_grad()
            loss = mse(net, batch)
            if net is model:
                backward(loss, opt)
                mpinit.clip_grad_norm_(opt, 0.1)
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            opt.step()
    same(model.parameters(), reference.parameters())
    train_plainly(reference, plain, [])
