"""A loss made of masters themselves: their own gradients are added to those of their weights, or refused."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from loops import batches, mlp, mse
from torch import nn

import mpinit
from mpinit.masters import own_gradients

QUIET: dict[str, Any] = {"verbosity": 0}
LEVELS: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2", "init_loss_scale": 1024.0} | QUIET,
    "O5": {"opt_level": "O5"} | QUIET,
}
AT_LEVELS = pytest.mark.parametrize("level", LEVELS)
WAYS = pytest.mark.parametrize("way", ["plain", "scale_loss", "GradScaler", "two losses", "create_graph", "closure"])


def in_groups(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def penalty(optimizer: torch.optim.Optimizer, which: slice = slice(None)) -> torch.Tensor:
    """Half of the squared parameters: its gradient is the parameters, whatever the loss."""
    return 0.5 * sum((p.square().sum() for p in in_groups(optimizer)[which]), torch.zeros(()))


class Loop:
    """Steps on a loss with a penalty over the groups, in several ways; ``level`` None: plain float32."""

    def __init__(self, level: str | None, way: str, momentum: float = 0.9, **more: Any) -> None:
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=momentum)
        self.way = way if level is not None or way in {"plain", "create_graph", "closure"} else "plain"
        if level is not None:
            losses = 2 if way == "two losses" else 1
            mpinit.initialize(self.model, self.optimizer, num_losses=losses, **LEVELS[level], **more)
        self.scaler = mpinit.GradScaler(self.optimizer) if self.way == "GradScaler" else None

    def backward(self, batch: Any, which: slice = slice(None)) -> torch.Tensor:
        loss = mse(self.model, batch)
        if self.way == "two losses":
            for loss_id, part in enumerate((loss, penalty(self.optimizer, which))):
                with mpinit.scale_loss(part, self.optimizer, loss_id=loss_id) as scaled_loss:
                    scaled_loss.backward()
            return loss
        loss = loss + penalty(self.optimizer, which)
        if self.way in {"scale_loss", "closure"} and mpinit_knows(self.optimizer):
            with mpinit.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        elif self.scaler is not None:
            self.scaler.scale(loss).backward()
        else:
            loss.backward(create_graph=self.way == "create_graph")
        return loss.detach()

    def step(self, data: list[Any], which: slice = slice(None)) -> None:
        if self.way == "closure":

            def closure() -> torch.Tensor:
                self.optimizer.zero_grad()
                return self.backward(data[0], which)

            self.optimizer.step(closure)
            return
        for batch in data:
            self.backward(batch, which)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()


def mpinit_knows(optimizer: torch.optim.Optimizer) -> bool:
    return "step" in vars(optimizer)


def is_as_float32(level: str, way: str, passes: int, which: slice = slice(None), **more: Any) -> None:
    loop, plain = Loop(level, way, **more), Loop(None, way)
    data = batches(6)
    for index in range(0, 6, passes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # not scaled, and create_graph
            loop.step(data[index : index + passes], which)
            plain.step(data[index : index + passes], which)
    for got, expected in zip(in_groups(loop.optimizer), plain.model.parameters(), strict=True):
        torch.testing.assert_close(got.detach(), expected.detach(), rtol=0.02, atol=0.005)


@AT_LEVELS
@WAYS
@pytest.mark.parametrize("passes", [1, 2])
def test_a_penalty_over_the_groups_counts(level: str, way: str, passes: int) -> None:
    refused = {("O2", "create_graph", 1), ("O2", "create_graph", 2), ("O5", "create_graph", 2)}
    if (level, way, passes) in refused:
        with pytest.raises(RuntimeError, match=r"gradient that its float32 master does not|create_graph=True, or make"):
            is_as_float32(level, way, passes)
        return
    is_as_float32(level, way, passes)


@AT_LEVELS
def test_a_penalty_over_some_of_the_groups_parameters_counts(level: str) -> None:
    is_as_float32(level, "scale_loss", 2, slice(1, 3))


def test_a_masters_gradient_is_not_rounded_to_16_bit() -> None:
    loop = Loop("O5", "plain", momentum=0.0)
    masters = [p.detach().clone() for p in in_groups(loop.optimizer)]
    penalty(loop.optimizer).backward()
    for parameter, before in zip(loop.model.parameters(), masters, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, before)
    loop.optimizer.step()
    for now, before in zip(in_groups(loop.optimizer), masters, strict=True):
        torch.testing.assert_close(now.detach(), before * (1 - 0.05), rtol=1e-6, atol=0)


def test_an_overflow_in_a_masters_own_gradient_skips_the_step() -> None:
    loop = Loop("O2", "scale_loss")
    before = [p.detach().clone() for p in in_groups(loop.optimizer)]
    loss = mse(loop.model, batches(1)[0]) + penalty(loop.optimizer) * torch.tensor(torch.inf)
    with mpinit.scale_loss(loss, loop.optimizer) as scaled_loss:
        scaled_loss.backward()
    loop.optimizer.step()
    assert mpinit.step_was_skipped(loop.optimizer)
    assert all(map(torch.equal, in_groups(loop.optimizer), before))


def test_a_frozen_weight_that_is_trained_later_counts() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mpinit.initialize(model, optimizer, "O5", verbosity=0)
    model[0].weight.requires_grad_(True)
    model(batches(1)[0][0])  # the master follows
    master = in_groups(optimizer)[0]
    (mse(model, batches(1)[0]) * 0 + penalty(optimizer)).backward()
    assert model[0].weight.grad is master.grad
    assert torch.equal(master.grad, master.detach())


def test_model_zero_grad_in_an_accumulating_loop_is_refused_and_the_way_out_works() -> None:
    loop = Loop("O5", "plain")
    loop.step(batches(1))
    loop.backward(batches(1)[0])
    loop.optimizer.step()
    loop.model.zero_grad()
    with pytest.raises(RuntimeError, match=r"clear gradients by optimizer\.zero_grad\(\), not by model\.zero_grad"):
        loop.backward(batches(1)[0])
    loop.optimizer.zero_grad()
    loop.step(batches(1))


@pytest.mark.parametrize("way", ["plain", "scale_loss"])
def test_masters_without_numbers_are_refused(way: str) -> None:
    loop = Loop("O5", way, master_weights="split")
    with pytest.raises(RuntimeError, match=r'no numbers between steps with master_weights="split".*model\.parameters'):
        loop.backward(batches(1)[0])
    loop.optimizer.zero_grad()
    loss = mse(loop.model, batches(1)[0]) + sum(p.square().sum() for p in mpinit.master_params(loop.optimizer))
    loss.backward()  # the weights, which do
    loop.optimizer.step()
    assert all(p.isfinite().all() for p in loop.model.parameters())


def test_steps_ahead_of_a_masters_own_gradient_are_refused() -> None:
    loop = Loop("O5", "plain", gradient_release=True)
    with pytest.raises(RuntimeError, match=r"gradient_release=True steps a parameter before.*model\.parameters"):
        loop.backward(batches(1)[0])


def test_gradients_that_no_other_rank_would_see_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop("O5", "plain")
    monkeypatch.setattr(own_gradients, "has_other_processes", lambda: True)
    with pytest.raises(RuntimeError, match=r"not averaged over ranks: .*model\.parameters"):
        loop.backward(batches(1)[0])


def test_copies_pickles_and_the_collector_see_no_hook() -> None:
    loop = Loop("O5", "plain")
    copied = copy.deepcopy(in_groups(loop.optimizer)[0])
    assert not copied._post_accumulate_grad_hooks
    assert torch.equal(pickle.loads(pickle.dumps(in_groups(loop.optimizer)[0])), copied)
    gc.disable()
    try:
        master = weakref.ref(in_groups(loop.optimizer)[0])
        mpinit.undo(loop.model)
        assert master() is None
    finally:
        gc.enable()
