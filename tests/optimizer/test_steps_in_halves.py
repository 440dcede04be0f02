"""Optimizers that step in two halves, each after a backward pass of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import backward, batches, masters, mlp, mse, poison, same
from torch import nn
from torch.optim import SGD, Optimizer

import mpinit


class Sharpness(SGD):
    """Climbs first and descends then."""

    def first_step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["climb"] = parameter.grad.clone()
                parameter.add_(parameter.grad, alpha=0.05)

    def second_step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(self.state[parameter]["climb"], alpha=0.05)
        self.step()


def test_a_step_in_two_halves_is_right() -> None:
    model = mlp()
    optimizer = Sharpness(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", verbosity=0)
    batch = batches(1)[0]
    backward(mse(model, batch), optimizer)
    start = masters(optimizer)
    gradients = [p.grad.clone() for p in mpinit.master_params(optimizer)]  # type: ignore[union-attr]
    optimizer.first_step()
    for weight, value, gradient in zip(model.parameters(), start, gradients, strict=True):
        assert torch.equal(weight, (value + 0.05 * gradient).bfloat16()), "the model is where the first half went"
    optimizer.zero_grad()
    backward(mse(model, batch), optimizer)
    climbed = [p.grad.clone() for p in mpinit.master_params(optimizer)]  # type: ignore[union-attr]
    optimizer.second_step()
    for master, value, gradient in zip(masters(optimizer), start, climbed, strict=True):
        torch.testing.assert_close(master, value - 0.1 * gradient, rtol=1e-6, atol=1e-7)


class SharpnessOf(Optimizer):
    """Two halves around another optimizer, which it alone steps; a whole step is made of both."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = SGD(self.param_groups, lr=0.1, momentum=0.9, weight_decay=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.05)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter].pop("old"))
        self.base.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()


def climbing_by_hand(data: list[Any]) -> tuple[nn.Module, Optimizer]:
    """Float16 with float32 masters, written out; the scale does not matter, a power of 2."""
    model, reference = mlp(), mlp()
    optimizer = SharpnessOf(reference.parameters())
    for batch in data:
        for half in (optimizer.first_step, optimizer.second_step):
            model = mlp().half()
            model.load_state_dict(reference.state_dict())
            (1024 * nn.functional.mse_loss(model(batch[0].half()).float(), batch[1])).backward()
            for weight, master in zip(model.parameters(), reference.parameters(), strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float() / 1024
            half()
    return reference, optimizer


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("overflows_in", ["first", "second"])
def test_a_step_in_two_halves_skips_both_on_overflow(overflows_in: str, whole: bool) -> None:
    model, data = mlp(), batches(6)
    optimizer = SharpnessOf(model.parameters())
    mpinit.initialize(model, optimizer, "O2", init_loss_scale=1024.0, verbosity=0)
    bad = {"first": 0, "second": 1}[overflows_in]
    for number, batch in enumerate(data):
        evaluations = 0

        def evaluate(number: int = number, batch: Any = batch) -> torch.Tensor:
            nonlocal evaluations
            optimizer.zero_grad()
            loss = mse(model, batch)
            overflows = number == 2 and evaluations == bad
            evaluations += 1
            backward(poison(loss, model[0].weight) if overflows else loss, optimizer)
            return loss

        evaluate()
        if whole:
            optimizer.step(evaluate)
        else:
            optimizer.first_step(zero_grad=True)
            evaluate()
            optimizer.second_step(zero_grad=True)
    # A closure is evaluated again.
    done = data if whole and bad else data[:2] + data[3:]
    reference, by_itself = climbing_by_hand(done)
    same(masters(optimizer), reference.parameters())
    assert mpinit.loss_scale(optimizer) == 512.0
    assert mpinit.step_counts(optimizer) == (len(done), len(data) - len(done))
    mpinit.undo(model)
    same(model.parameters(), reference.parameters())
    momenta = [
        [each.base.state[p]["momentum_buffer"] for p in each.param_groups[0]["params"]]
        for each in (optimizer, by_itself)
    ]
    same(*momenta)


def test_halves_step_what_a_plain_backward_left_where_nothing_is_scaled() -> None:
    model, batch = mlp(), batches(1)[0]
    optimizer = SharpnessOf(model.parameters())
    mpinit.initialize(model, optimizer, "O5", verbosity=0)
    start = masters(optimizer)
    mse(model, batch).backward()
    optimizer.first_step(zero_grad=True)
    assert not any(torch.equal(a, b) for a, b in zip(start, masters(optimizer), strict=True))
    mse(model, batch).backward()
    optimizer.second_step(zero_grad=True)
    assert mpinit.step_counts(optimizer) == (1, 0)
