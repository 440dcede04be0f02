"""Where nothing is to be unscaled a plain ``backward()`` counts, against float32 masters by hand."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import backward, batches, follow, masters, mlp, momentum, mse, same, start, started, train
from masters_by_hand import SETTINGS, ByHand
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpinit

DATA = batches(4)


def set_up(setting: str, late: bool) -> tuple[nn.Module, ByHand, torch.optim.Optimizer]:
    model = mlp()
    by_hand, optimizer = ByHand(model, setting), momentum(model.parameters())
    mpinit.initialize(model, *(() if late else (optimizer,)), await_optimizers=late, **SETTINGS[setting])
    return model, by_hand, optimizer


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_passes_of_any_kind_add_up_as_masters_by_hand(setting: str, late: bool) -> None:
    model, by_hand, optimizer = set_up(setting, late)
    if late:
        mpinit.add_optimizers(optimizer)
    scaler = mpinit.GradScaler(optimizer)
    for step in range(3):
        for batch, kind in zip(DATA, ("plain", "scale_loss", "torch.autograd", "GradScaler"), strict=True):
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
    model, by_hand, optimizer = set_up(setting, late)
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
        del wrapped  # whose reducer would be the last to hold the group
    finally:
        dist.destroy_process_group()
    same(model.parameters(), by_hand.model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("first", [True, False])
def test_backward_of_the_loss_itself_inside_the_block_is_refused(level: str, first: bool) -> None:
    model, optimizer = started(level)
    if not first:
        train(model, optimizer, DATA[:1])
        optimizer.zero_grad()
    before = masters(optimizer)
    loss = mse(model, DATA[0])
    with (
        pytest.raises(RuntimeError, match=r"not from scaled_loss\. Call scaled_loss.backward\(\).* scale of 1024"),
        mpinit.scale_loss(loss, optimizer),
    ):
        loss.backward()
    assert all(weight.grad is None for weight in model.parameters())
    same(masters(optimizer), before)
    train(model, optimizer, DATA[:1])
    assert not any(map(torch.equal, masters(optimizer), before))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_backward_of_the_scaled_loss_after_its_block_is_refused(level: str) -> None:
    """Refuse gradients that nothing would unscale, also after a first pass inside the block."""
    model, optimizer = started(level)
    for is_used in (False, True):
        with mpinit.scale_loss(mse(model, DATA[0]), optimizer) as scaled_loss:
            if is_used:
                scaled_loss.backward(retain_graph=True)
        before = [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]
        with pytest.raises(RuntimeError, match=r"Call scaled_loss.backward\(\) inside the block"):
            scaled_loss.backward()
        same(before, [weight.grad for weight in model.parameters()])
    train(model, optimizer, DATA[:1])


def test_other_uses_of_the_scaled_loss_are_allowed() -> None:
    model, optimizer = started()
    with mpinit.scale_loss(mse(model, DATA[0]), optimizer) as scaled_loss:
        (scaled_loss * 0.5).backward()
    halved = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    with mpinit.scale_loss(mse(model, DATA[0]), optimizer):
        pass
    optimizer.zero_grad()
    with mpinit.scale_loss(mse(model, DATA[0]), optimizer) as scaled_loss:
        found = torch.autograd.grad(scaled_loss, list(model.parameters()))
        for weight, gradient in zip(model.parameters(), found, strict=True):
            weight.grad = gradient
    same([2 * each for each in halved], [weight.grad for weight in model.parameters()])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_inside_a_block_of_the_same_optimizer_is_refused(level: str) -> None:
    model, optimizer = started(level)
    with (
        pytest.raises(RuntimeError, match="inside another block for the same optimizer"),
        mpinit.scale_loss(mse(model, DATA[0]), optimizer),
        mpinit.scale_loss(mse(model, DATA[0]), optimizer),
    ):
        pass
    train(model, optimizer, DATA[:1])
    assert not mpinit.step_was_skipped(optimizer)


def test_step_that_writes_to_weights_leaves_masters_alone() -> None:
    class Meddler(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            with torch.no_grad():
                model.weight.add_(1.0)

    model = nn.Linear(4, 1, bias=False)
    optimizer = start(model, make=lambda p: Meddler(p, lr=0.1), loss_scale=8.0)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model(torch.ones(1, 4)).sum(), optimizer)
        (before,) = masters(optimizer)
        optimizer.step()
        torch.testing.assert_close(masters(optimizer), [before - 0.1])
        follow(model, optimizer)
