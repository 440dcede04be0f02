"""Which parameters take part is what the groups and ``requires_grad`` say at every step, by identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from law_cases import GRADIENT, START, begin, each_mode, entry, initialise, is_number, number, one_weight, pull
from loops import plain_sgd
from torch import nn
from torch.optim import SGD

import mpinit


class Both(nn.Module):
    """Two weights in a model that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = one_weight(), one_weight()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """The first's output and twice the second's."""
        return self.first(given) + 2 * self.second(given)


LEVELS = [("O1", torch.float16, True), ("O2", torch.float16, True), ("O2", torch.bfloat16, "split")]
each_level = pytest.mark.parametrize(("level", "dtype", "masters"), LEVELS, ids=["O1", "O2", "split"])


@each_mode
def test_what_is_frozen_through_the_groups_stays(dtype: torch.dtype, masters: Any) -> None:
    model = Both()
    optimizer = plain_sgd(model.parameters())
    initialise(model, optimizer, dtype, masters)
    entry(optimizer).requires_grad_(False)
    pull(model, optimizer)
    optimizer.step()
    assert torch.equal(number(model, "second.weight"), START - 2 * GRADIENT)
    optimizer.zero_grad()
    entry(optimizer).requires_grad_(True)
    pull(model, optimizer)
    optimizer.step()
    assert torch.equal(number(model, "second.weight"), START - 2 * GRADIENT - 2 * GRADIENT)
    is_number(model, START - GRADIENT, "first.weight")


@each_mode
def test_a_look_through_the_groups_shows_who_is_trained(dtype: torch.dtype, masters: Any) -> None:
    """Without it, to freeze in the model what was thawed in the groups would change nothing there, and be lost."""
    model = Both()
    optimizer = plain_sgd(model.parameters())
    initialise(model, optimizer, dtype, masters)
    entry(optimizer).requires_grad_(False)
    list(mpinit.master_params(optimizer))
    assert not model.first.weight.requires_grad
    entry(optimizer).requires_grad_(True)
    list(mpinit.master_params(optimizer))
    assert model.first.weight.requires_grad
    model.first.weight.requires_grad_(False)
    pull(model, optimizer)
    optimizer.step()
    assert torch.equal(number(model, "first.weight"), START)
    assert torch.equal(number(model, "second.weight"), START - 2 * GRADIENT)


@each_mode
def test_what_is_frozen_in_the_model_stays(dtype: torch.dtype, masters: Any) -> None:
    model = Both()
    optimizer = plain_sgd(model.parameters())
    initialise(model, optimizer, dtype, masters)
    model.first.weight.requires_grad_(False)
    pull(model, optimizer)
    optimizer.step()
    is_number(model, START, "first.weight")


@each_level
def test_an_entry_that_was_exchanged_is_trained(level: str, dtype: torch.dtype, masters: Any) -> None:
    model = Both()
    optimizer = plain_sgd(model.first.parameters())
    initialise(model, optimizer, dtype, masters, level)
    before = number(model, "second.weight")
    optimizer.param_groups[0]["params"][0] = model.second.weight
    pull(model, optimizer)
    optimizer.step()
    torch.testing.assert_close(number(model, "second.weight"), before - 2 * GRADIENT, rtol=0.0, atol=2.0**-8)
    is_number(model, START, "first.weight") if level == "O1" else mpinit.undo(model)


@each_level
def test_a_list_of_the_models_own_parameters_is_trained(level: str, dtype: torch.dtype, masters: Any) -> None:
    model = Both()
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.5)
    initialise(model, optimizer, dtype, masters, level)
    pull(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    pull(model, optimizer)
    optimizer.step()
    # Momentum goes on: the second step is 1.5 gradients long.
    assert torch.equal(number(model, "first.weight"), (START - GRADIENT) - 1.5 * GRADIENT)
    is_number(model, (START - 2 * GRADIENT) - 3 * GRADIENT, "second.weight")


@each_mode
def test_the_models_own_parameter_put_back_keeps_its_master(dtype: torch.dtype, masters: Any) -> None:
    model, optimizer = begin(dtype, masters)
    master = entry(optimizer)
    optimizer.param_groups[0]["params"][0] = model.weight
    pull(model, optimizer)
    optimizer.step()
    assert entry(optimizer) is master
    is_number(model, START - GRADIENT)


@each_mode
def test_what_was_removed_stays_and_is_float32_after_an_undo(dtype: torch.dtype, masters: Any) -> None:
    model = Both()
    optimizer = plain_sgd(model.parameters())
    initialise(model, optimizer, dtype, masters)
    del optimizer.param_groups[0]["params"][0]
    pull(model, optimizer)
    optimizer.step()
    assert torch.equal(number(model, "second.weight"), START - 2 * GRADIENT)
    assert torch.equal(number(model, "first.weight").to(dtype), START.to(dtype))
    mpinit.undo(model)
    assert model.first.weight.dtype is model.second.weight.dtype is torch.float32


@each_mode
@pytest.mark.parametrize("came_in_16_bit", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_one_weight_of_two_optimizers_has_one_number(
    dtype: torch.dtype, masters: Any, came_in_16_bit: bool, later: bool
) -> None:
    model = one_weight()
    if came_in_16_bit:
        model.to(dtype)
    other = one_weight() if later else model
    first, second = plain_sgd(model.parameters()), plain_sgd(other.parameters())
    initialise([model, other] if later else model, [first, second], dtype, masters)
    start = number(model)
    if later:
        second.add_param_group({"params": [model.weight], "lr": 1.0})
    pull(model, [first, second])
    first.step()
    second.step()
    is_number(model, (start - GRADIENT) - GRADIENT)


@pytest.mark.filterwarnings("ignore:.*did not come through mpinit.scale_loss")
@each_level
def test_a_scaled_gradient_of_another_optimizer_is_never_stepped(level: str, dtype: torch.dtype, masters: Any) -> None:
    model = Both()
    first, second = plain_sgd(model.first.parameters()), plain_sgd(model.second.parameters())
    initialise(model, [first, second], dtype, masters, level)
    try:
        pull(model, first)
        second.step()
    except RuntimeError:
        expected = START
    else:
        expected = START - 2 * GRADIENT
    is_number(model, expected, "second.weight")


@each_level
@pytest.mark.parametrize("added", [True, False])
def test_a_scaled_gradient_from_before_it_joined_is_never_stepped(
    level: str, dtype: torch.dtype, masters: Any, added: bool
) -> None:
    model = Both()
    optimizer = plain_sgd(model.first.parameters())
    initialise(model, optimizer, dtype, masters, level)
    before = number(model, "second.weight")
    try:
        pull(model, optimizer)
        if added:
            optimizer.add_param_group({"params": [model.second.weight]})
        else:
            optimizer.param_groups[0]["params"].append(model.second.weight)
        optimizer.step()
    except RuntimeError:
        expected = before
    else:
        expected = before - 2 * GRADIENT
    torch.testing.assert_close(number(model, "second.weight"), expected, rtol=0.0, atol=2.0**-8)
    mpinit.undo(model)
