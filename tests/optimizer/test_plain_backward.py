"""Where nothing is to be unscaled a plain ``backward()`` counts, against float32 masters by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from loops import backward, batches, mlp, momentum, mse, same
from masters_by_hand import SETTINGS, ByHand
from torch.nn.parallel import DistributedDataParallel

import mpinit

DATA = batches(4)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_backward_passes_of_any_kind_add_up_to_the_bits_of_masters_by_hand(setting: str, late: bool) -> None:
    model = mlp()
    by_hand, optimizer = ByHand(model, setting), momentum(model.parameters())
    mpinit.initialize(model, *(() if late else (optimizer,)), await_optimizers=late, verbosity=0, **SETTINGS[setting])
    if late:
        mpinit.add_optimizers(optimizer)
    scaler = mpinit.GradScaler(optimizer)
    for step in range(3):
        for batch, kind in zip(DATA, ("plain", "torch.autograd", "scale_loss", "GradScaler"), strict=True):
            loss = mse(model, batch)
            assert torch.equal(loss.detach(), by_hand.backward(batch))
            if kind == "scale_loss":
                backward(loss, optimizer)
            elif kind == "torch.autograd":
                torch.autograd.backward(loss)
            else:
                (scaler.scale(loss) if kind == "GradScaler" else loss).backward()
        torch.nn.utils.clip_grad_norm_(mpinit.master_params(optimizer) if step else model.parameters(), 0.5)
        by_hand.clip(0.5)
        optimizer.step()
        by_hand.step()
        (model if step else optimizer).zero_grad()
        by_hand.clear()
        same(model.parameters(), by_hand.model.parameters())
        same(model.state_dict().values(), by_hand.masters)
    mpinit.undo(model)
    same(model.parameters(), by_hand.masters)


@pytest.mark.parametrize("setting", ["O5", "split"])
@pytest.mark.parametrize("late", [False, True])
def test_a_process_group_that_comes_after_initialize(setting: str, late: bool) -> None:
    model = mlp()
    by_hand = ByHand(model, setting)
    optimizer = momentum(model.parameters())
    mpinit.initialize(model, *(() if late else (optimizer,)), await_optimizers=late, verbosity=0, **SETTINGS[setting])
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if late:
            mpinit.add_optimizers(optimizer)
        for batch in DATA:
            optimizer.zero_grad()
            mse(wrapped, batch).backward()
            optimizer.step()
            by_hand.clear()
            by_hand.backward(batch)
            by_hand.step()
    finally:
        dist.destroy_process_group()
    same(model.parameters(), by_hand.model.parameters())
