"""What happens to masters outside of step(): two-step optimizers without a closure, writes by hand, nested blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import backward, batches, mlp, mse, same, start
from torch import nn
from torch.optim import SGD, Optimizer

import mpinit


class TwoStep(Optimizer):
    """Sharpness-aware minimisation called in two halves, each after a backward pass of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.detach().clone()
                parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["old"])
        self.base.step()


def two_step_losses(level: str | None) -> tuple[list[float], list[float]]:
    model = mlp()
    optimizer: Any = TwoStep(model.parameters()) if level is None else start(model, level, make=TwoStep)
    first, second = [], []
    for batch in batches(5):
        optimizer.zero_grad()
        for losses in (first, second):
            loss = mse(model, batch)
            losses.append(loss.item())
            backward(loss, optimizer) if level is not None else loss.backward()
            optimizer.first_step() if losses is first else optimizer.step()
    return first, second


def test_the_second_backward_of_a_two_step_optimizer_sees_the_first_steps_weights() -> None:
    first, second = two_step_losses("O2")
    plain_first, plain_second = two_step_losses(None)
    assert all(b > a for a, b in zip(first, second, strict=True))  # the first half climbs
    torch.testing.assert_close(first, plain_first, rtol=0.01, atol=1e-3)
    torch.testing.assert_close(second, plain_second, rtol=0.01, atol=1e-3)


def test_a_master_written_by_hand_reaches_its_weight_when_gradients_are_cleared() -> None:
    model = mlp()
    optimizer = start(model, "O2")
    with torch.no_grad():
        for master in mpinit.master_params(optimizer):
            master.fill_(0.25)
    optimizer.zero_grad()
    same(model.parameters(), [torch.full_like(p, 0.25) for p in model.parameters()])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_inside_a_block_of_the_same_optimizer_is_refused(level: str) -> None:
    model = mlp()
    optimizer = start(model, level)
    batch = batches(1)[0]
    with (
        pytest.raises(RuntimeError, match="inside another block for the same optimizer"),
        mpinit.scale_loss(mse(model, batch), optimizer),
        mpinit.scale_loss(mse(model, batch), optimizer),
    ):
        pass
    backward(mse(model, batch), optimizer)
    optimizer.step()
    assert not mpinit.step_was_skipped(optimizer)


def test_a_step_that_writes_to_weights_itself_leaves_the_masters_alone() -> None:
    class Meddler(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            with torch.no_grad():
                model.weight.add_(1.0)

    model = nn.Linear(4, 1, bias=False)
    optimizer = Meddler(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O2", loss_scale=8.0, verbosity=0)
    for _ in range(3):
        optimizer.zero_grad()
        with mpinit.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        before = [p.detach().clone() for p in mpinit.master_params(optimizer)]
        optimizer.step()
        for master, old in zip(mpinit.master_params(optimizer), before, strict=True):
            torch.testing.assert_close(master.detach(), old - 0.1)
            assert torch.equal(model.weight.detach(), master.detach().half())
    mpinit.undo(model)


def test_training_goes_on_after_the_process_group_is_gone() -> None:
    """Gradients that were left in 16 bit for the ranks' buckets still become float32 on the masters."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, "O2", loss_scale=8.0, verbosity=0)
    finally:
        torch.distributed.destroy_process_group()
    before = [p.detach().clone() for p in mpinit.master_params(optimizer)]
    with mpinit.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    for master, old in zip(mpinit.master_params(optimizer), before, strict=True):
        assert master.grad is not None and master.grad.dtype is torch.float32
        torch.testing.assert_close(master.detach(), old - 0.1)
    mpinit.undo(model)
