"""Writes to weights from outside of the session: they reach the masters, and cost no bit where nothing was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from loops import backward, batches, gradients, masters, mlp, mse, plain_sgd, same, start, train
from torch import nn

Write = Callable[[nn.Module, list[torch.Tensor]], None]


def _copy_(model: nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def _data_copy(model: nn.Module, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data.copy_(value)


def _data_assigned(model: nn.Module, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data = value.to(parameter.dtype)


def _detached(model: nn.Module, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.detach().copy_(value)


def _loaded(model: nn.Module, values: list[torch.Tensor]) -> None:
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))


def _vector(model: nn.Module, values: list[torch.Tensor]) -> None:
    flat = torch.cat([value.flatten() for value in values])
    nn.utils.vector_to_parameters(flat.to(next(model.parameters()).dtype), model.parameters())


def _foreach(model: nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), values)


WRITES: dict[str, Write] = {
    "copy_": _copy_,
    "data.copy_": _data_copy,
    "data = ": _data_assigned,
    "detach().copy_": _detached,
    "load_state_dict": _loaded,
    "vector_to_parameters": _vector,
    "foreach": _foreach,
}


@pytest.mark.parametrize("when", ["at once", "after steps", "between backward and step"])
@pytest.mark.parametrize("mode", [True, "split"])
@pytest.mark.parametrize("how", WRITES)
def test_a_write_to_the_weights_reaches_the_masters(how: str, mode: Any, when: str) -> None:
    model, batch = mlp(), batches(1)[0]
    optimizer = start(model, "O2", torch.bfloat16, plain_sgd, master_weights=mode)
    values = [p.detach().bfloat16().float() for p in mlp(seed=7).parameters()]
    if when == "after steps":
        train(model, optimizer, batches(3))
    if when == "between backward and step":
        backward(mse(model, batch), optimizer)
        WRITES[how](model, values)
    else:
        WRITES[how](model, values)
        optimizer.zero_grad()
        backward(mse(model, batch), optimizer)
    moved = [g.float() for g in gradients(optimizer) if g is not None]
    optimizer.step()
    expected = [value - gradient for value, gradient in zip(values, moved, strict=True)]
    if mode == "split" and how != "load_state_dict":
        is_within_rounding(model.state_dict().values(), expected, values)
    else:
        same(model.state_dict().values(), expected)


def is_within_rounding(ours: Iterable[torch.Tensor], expected: list[torch.Tensor], written: list[torch.Tensor]) -> None:
    """A split master is the written weight and the low bits it had: at most half a unit of the last place away."""
    for got, wanted, value in zip(ours, expected, written, strict=True):
        assert bool(((got - wanted).abs() <= value.abs() * 2.0**-8).all())


@pytest.mark.parametrize("mode", [True, "split"])
def test_writing_back_what_was_there_leaves_the_masters_their_bits(mode: Any) -> None:
    model, data = mlp(), batches(3)
    untouched = mlp()
    optimizer = start(model, "O2", torch.bfloat16, master_weights=mode)
    reference = start(untouched, "O2", torch.bfloat16, master_weights=mode)
    for batch in data:
        train(model, optimizer, [batch])
        train(untouched, reference, [batch])
        exact = {name: value.clone() for name, value in model.state_dict().items()}
        _data_copy(model, [p.detach() * 0 for p in model.parameters()])
        model(batch[0])
        model.load_state_dict(exact)
    same(model.state_dict().values(), untouched.state_dict().values())


def test_an_ema_swap_in_16_bit_leaves_the_masters_their_bits() -> None:
    model, untouched, data = mlp(), mlp(), batches(4)
    optimizer, reference = start(model), start(untouched)
    averages = [p.detach().clone() for p in model.parameters()]
    for batch in data:
        train(model, optimizer, [batch])
        train(untouched, reference, [batch])
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.lerp_(parameter.data, 0.5)
        backup = [p.data.clone() for p in model.parameters()]
        for parameter, average in zip(model.parameters(), averages, strict=True):
            parameter.data.copy_(average)
        mse(model, batch)
        for parameter, saved in zip(model.parameters(), backup, strict=True):
            parameter.data.copy_(saved)
    same(masters(optimizer), masters(reference))


@pytest.mark.parametrize("mode", [True, "split"])
def test_clamping_through_data_binds_the_masters(mode: Any) -> None:
    model = mlp()
    optimizer = start(model, "O2", torch.bfloat16, master_weights=mode)
    for batch in batches(4):
        train(model, optimizer, [batch])
        for parameter in model.parameters():
            parameter.data.clamp_(-0.0625, 0.0625)
        # What still is its weight's float32 original may lie half a bfloat16 step beyond the limit.
        assert all(bool((value.abs() <= 0.0625 * (1 + 2**-8)).all()) for value in model.state_dict().values())


@pytest.mark.parametrize("mode", [True, "split"])
def test_reading_data_changes_nothing_and_writing_to_it_steps_later_reaches_the_masters(mode: Any) -> None:
    model, untouched, data = mlp(), mlp(), batches(4)
    optimizer = start(model, "O2", torch.bfloat16, plain_sgd, master_weights=mode)
    reference = start(untouched, "O2", torch.bfloat16, plain_sgd, master_weights=mode)
    held = [parameter.data for parameter in model.parameters()]
    for batch in data:
        train(model, optimizer, [batch])
        train(untouched, reference, [batch])
        model.state_dict()
    same(model.state_dict().values(), untouched.state_dict().values())
    for value in held:
        value.fill_(0.25)
    optimizer.zero_grad()
    optimizer.step()
    assert all(bool((weight == 0.25).all()) for weight in model.parameters())
    quarters = [torch.full_like(value, 0.25) for value in model.state_dict().values()]
    is_within_rounding(model.state_dict().values(), quarters, quarters)
    if mode is True:
        same(model.state_dict().values(), quarters)


def test_a_write_between_two_sessions_goes_to_its_own() -> None:
    model, other = mlp(), mlp()
    optimizer, bystander = start(model), start(other)
    train(other, bystander, batches(2))
    before = masters(bystander)
    for parameter in model.parameters():
        parameter.data.fill_(2.0)
    optimizer.step()
    bystander.step()
    assert all(bool((value == 2).all()) for value in masters(optimizer))
    assert len(before) == len(masters(bystander))
