"""Loops that make an optimizer for each parameter, as Pyro's do: known from the beginning, or made when first seen."""

from typing import Any

import pytest
import torch
from loops import backward
from torch import Tensor, nn

import mpinit

KINDS: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O5": {"opt_level": "O5"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
    "O5, model": {"opt_level": "O5", "master_weights": "model"},
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(10)], nn.Linear(8, 1))


def loss(model: nn.Module) -> Tensor:
    out: Tensor = model(torch.linspace(-1, 1, 32).reshape(4, 8))
    return out.square().mean()


def made(parameter: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter], lr=0.1, momentum=0.9)


def trained(level: dict[str, Any], how: str) -> dict[str, Tensor]:
    model = net()
    one = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizers = [one] if how == "one" else [made(parameter) for parameter in model.parameters()]
    if how == "added":
        mpinit.initialize(model, await_optimizers=True, **level)
        for optimizer in optimizers:
            mpinit.add_optimizers(optimizer)
    else:
        mpinit.initialize(model, optimizers, **level)
    for _ in range(3):
        backward(loss(model), optimizers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("level", KINDS)
@pytest.mark.parametrize("how", ["listed", "added"])
def test_many_optimizers_have_the_bits_of_one(level: str, how: str) -> None:
    one, many = trained(KINDS[level], "one"), trained(KINDS[level], how)
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize("level", KINDS)
def test_optimizers_made_after_the_first_backward_pass(level: str) -> None:
    """Make optimizers as Pyro does: before the first of them there is nothing to scale a loss for."""
    model, plain = net(), net()
    mpinit.initialize(model, await_optimizers=True, loss_scale=1.0, **KINDS[level])
    late: dict[nn.Parameter, torch.optim.Optimizer] = {}
    bare = [made(parameter) for parameter in plain.parameters()]
    for _ in range(3):
        loss(model).backward()
        for parameter in model.parameters():
            if parameter not in late:
                late[parameter] = mpinit.add_optimizers(made(parameter))
            late[parameter].step()
            late[parameter].zero_grad()
        loss(plain).backward()
        for optimizer in bare:
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    assert all(torch.allclose(state[name], value, atol=2e-3) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("level", ["O2", "O5", "O5, split"])
def test_optimizers_that_initialize_does_not_know_are_refused(level: str) -> None:
    model = net()
    mpinit.initialize(model, await_optimizers=True, loss_scale=1.0, **KINDS[level])
    optimizers = [made(parameter) for parameter in model.parameters()]
    loss(model).backward()
    with pytest.raises(RuntimeError, match="add_optimizers"):
        for optimizer in optimizers:
            optimizer.step()


def test_steps_inside_of_a_scaled_backward_pass_are_refused() -> None:
    model = net()
    optimizers = {parameter: made(parameter) for parameter in model.parameters()}
    mpinit.initialize(model, list(optimizers.values()), "O2")
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    with pytest.raises(RuntimeError, match="loss_scale=1"):
        backward(loss(model), list(optimizers.values()))
