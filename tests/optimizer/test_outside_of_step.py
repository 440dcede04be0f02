"""What happens to masters outside of step(): two-step optimizers without a closure, writes by hand, nested blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import backward, batches, mlp, mse, start
from torch import nn

import mpinit


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
        backward(model(torch.ones(1, 4)).sum(), optimizer)
        before = [p.detach().clone() for p in mpinit.master_params(optimizer)]
        optimizer.step()
        for master, old in zip(mpinit.master_params(optimizer), before, strict=True):
            torch.testing.assert_close(master.detach(), old - 0.1)
            assert torch.equal(model.weight.detach(), master.detach().half())


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
    backward(model(torch.ones(1, 4)).sum(), optimizer)
    optimizer.step()
    for master, old in zip(mpinit.master_params(optimizer), before, strict=True):
        assert master.grad is not None and master.grad.dtype is torch.float32
        torch.testing.assert_close(master.detach(), old - 0.1)
