"""What random loops have found, each as a loop of a few lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import backward, gradients, masters, mlp, momentum, plain_sgd, poison, same, start
from torch import nn

import mpinit


def total(model: nn.Module) -> torch.Tensor:
    """A loss that every parameter takes part in."""
    output: torch.Tensor = model(torch.ones(2, 6))
    return output.square().sum()


@pytest.mark.parametrize(
    "given",
    [{}, {"dtype": torch.bfloat16, "loss_scale": 1.0}, {"dtype": torch.bfloat16, "master_weights": "split"}],
    ids=str,
)
def test_what_was_frozen_when_initialize_ran_gets_a_master_once_it_trains(given: dict[str, Any]) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = start(model, "O2", **given)
    model[0].weight.requires_grad_(True)
    before = model.state_dict()["0.weight"].clone()
    backward(total(model), optimizer)
    optimizer.step()
    after = model.state_dict()["0.weight"]
    assert not torch.equal(after, before) and not torch.equal(after, after.to(model[0].weight.dtype).float())
    assert optimizer.state[model[0].weight]["momentum_buffer"].dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_clearing_through_the_model_clears_an_overflow_before_any_step(level: str, set_to_none: bool) -> None:
    model = mlp()
    optimizer = start(model, level, make=plain_sgd, loss_scale="dynamic", init_loss_scale=4.0)
    backward(poison(total(model), model[0].weight), optimizer)
    model.zero_grad(set_to_none)
    backward(total(model), optimizer)
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 0)


def overflowed(level: str) -> tuple[torch.nn.Sequential, torch.optim.Optimizer, list[torch.Tensor]]:
    """A model, its optimizer and masters, after a backward pass that overflowed."""
    model = mlp()
    optimizer = start(model, level, loss_scale="dynamic", init_loss_scale=4.0)
    before = masters(optimizer)
    backward(poison(total(model), model[0].weight), optimizer)
    return model, optimizer, before


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_step_on_nothing_after_an_overflow_was_cleared_is_none_skipped(level: str) -> None:
    model, optimizer, before = overflowed(level)
    model.zero_grad()
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 0)
    same(masters(optimizer), before)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_overflow_that_was_clipped_to_a_number_is_still_one(level: str) -> None:
    model, optimizer, before = overflowed(level)
    torch.nn.utils.clip_grad_value_(mpinit.master_params(optimizer), 1.0)
    optimizer.step()
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients(optimizer))
    backward(total(model), optimizer)
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (0, 2)
    same(masters(optimizer), before)


@pytest.mark.parametrize("first", [0, 1])
def test_a_check_put_off_moves_the_scale_at_whichever_step_comes_first(first: int) -> None:
    models = [mlp(), mlp(1)]
    optimizers = [momentum(model.parameters()) for model in models]
    mpinit.initialize(models, optimizers, opt_level="O2", init_loss_scale=4.0, verbosity=0)
    loss = poison(total(models[0]) + total(models[1]), models[0][0].weight)
    backward(loss, optimizers, delay_overflow_check=True)
    assert mpinit.loss_scale(optimizers[0]) == 4.0
    optimizers[first].step()
    assert mpinit.loss_scale(optimizers[0]) == 2.0
    optimizers[1 - first].step()
    assert mpinit.loss_scale(optimizers[0]) == 2.0


@pytest.mark.parametrize("master_weights", [True, "split"])
def test_undo_gives_the_masters_bits_of_a_group_that_was_added_later(master_weights: Any) -> None:
    model = mlp()
    optimizer = momentum(model[0].parameters())
    mpinit.initialize(model, optimizer, opt_level="O5", master_weights=master_weights, verbosity=0)
    optimizer.add_param_group({"params": list(model[3].parameters())})
    backward(total(model), optimizer)
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mpinit.undo(model)
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    same(model.state_dict().values(), before.values())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_what_the_model_cleared_is_not_zero_but_gone(level: str) -> None:
    model = mlp()
    optimizer = start(model, level, loss_scale="dynamic", init_loss_scale=4.0)
    backward(total(model), optimizer)
    model.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    assert gradients(optimizer) == [None] * 4
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_what_the_model_cleared_does_not_count_when_clipping(level: str) -> None:
    model = mlp()
    optimizer = start(model, level, loss_scale="dynamic", init_loss_scale=4.0)
    backward(total(model), optimizer)
    model[0].zero_grad()
    rest = [parameter.grad for parameter in model[3].parameters()]
    expected = torch.nn.utils.get_total_norm([gradient.float() for gradient in rest if gradient is not None])
    norm = mpinit.clip_grad_norm_(optimizer, 1e6)
    torch.testing.assert_close(norm.float(), expected, rtol=2e-3, atol=0)
