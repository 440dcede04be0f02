"""Where nothing is to be unscaled a plain ``backward()`` counts: loops of any kind, against float32 masters by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import Batch, batches, masters, mlp, momentum, mse, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS

import mpinit

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SETTINGS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O2": {"opt_level": "O2", "loss_scale": 1.0},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
}
WEIGHTS = {"O0": F32, "O2": F16, "O5": BF16, "split": BF16}
DATA = batches(4)


def rounded(master: torch.Tensor, setting: str) -> torch.Tensor:
    """A master's weight; that of a split one is rounded half away from zero."""
    if setting != "split":
        return master.to(WEIGHTS[setting])
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(BF16)


class ByHand:
    """Float32 masters, their gradients, and a model that is their rounding."""

    def __init__(self, model: nn.Module, setting: str, make: Any = momentum) -> None:
        self.setting = setting
        self.held = BF16 if setting == "split" else F32
        self.masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.model = copy.deepcopy(model).to(WEIGHTS[setting])
        self.optimizer = make(self.masters)
        self.gradients: list[torch.Tensor | None] = [None] * len(self.masters)
        self.follow()

    def follow(self) -> None:
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            weight.data = rounded(master.detach(), self.setting)

    def backward(self, batch: Batch) -> torch.Tensor:
        self.model.zero_grad()
        output = self.model(batch[0].to(WEIGHTS[self.setting])).float()
        loss = nn.functional.mse_loss(output, batch[1])
        loss.backward()
        for index, weight in enumerate(self.model.parameters()):
            before = self.gradients[index]
            fresh = weight.grad.to(self.held)  # type: ignore[union-attr]
            self.gradients[index] = fresh if before is None else before + fresh
        return loss.detach()

    def clip(self, norm: float) -> None:
        holders = [nn.Parameter(torch.zeros_like(g)) for g in self.gradients if g is not None]
        for holder, gradient in zip(holders, (g for g in self.gradients if g is not None), strict=True):
            holder.grad = gradient
        torch.nn.utils.clip_grad_norm_(holders, norm)

    def clear(self) -> None:
        self.gradients = [None] * len(self.masters)

    def step(self) -> None:
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = None if gradient is None else gradient.float()
        self.optimizer.step()
        self.follow()


ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["backward", "torch.autograd", "scale_loss", "GradScaler"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["clip the model's", "clip the masters'"]), st.sampled_from([0.05, 0.5])),
    st.tuples(st.just("assign"), st.sampled_from([F16, BF16, F32, torch.float64])),
    st.tuples(st.just("clear"), st.sampled_from(["optimizer", "model"])),
    st.tuples(st.just("step"), st.just(None)),
)


def act(model: Any, optimizer: Any, scaler: Any, by_hand: ByHand, kind: str, value: Any) -> None:
    if kind in ("backward", "torch.autograd", "scale_loss", "GradScaler"):
        loss = mse(model, DATA[value])
        assert torch.equal(loss.detach(), by_hand.backward(DATA[value]))
        if kind == "scale_loss":
            with mpinit.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        elif kind == "torch.autograd":
            torch.autograd.backward(loss)
        else:
            (scaler.scale(loss) if kind == "GradScaler" else loss).backward()
    elif kind.startswith("clip"):
        parameters = model.parameters() if "model" in kind else mpinit.master_params(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, value)
        by_hand.clip(value)
    elif kind == "assign":
        gradient = torch.full_like(model[0].weight, 0.3, dtype=value)
        by_hand.gradients[0] = gradient.to(by_hand.held)
        if value is not by_hand.held and model[0].weight.dtype is F32:
            gradient = gradient.float()  # a parameter that has no master takes its own type only
        model[0].weight.grad = gradient
    elif kind == "clear":
        (optimizer if value == "optimizer" else model).zero_grad()
        by_hand.clear()
    else:
        optimizer.step()
        by_hand.step()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@settings(max_examples=settings.default.max_examples // 8)  # type: ignore[union-attr]
@given(actions=st.lists(ACTIONS, min_size=2, max_size=10))
def test_any_loop_has_the_bits_of_masters_by_hand(setting: str, late: bool, actions: list[tuple[str, Any]]) -> None:
    model = mlp()
    by_hand = ByHand(model, setting)
    if late:
        mpinit.initialize(model, await_optimizers=True, verbosity=0, **SETTINGS[setting])
        optimizer = mpinit.add_optimizers(momentum(model.parameters()))
    else:
        optimizer = momentum(model.parameters())
        mpinit.initialize(model, optimizer, verbosity=0, **SETTINGS[setting])
    scaler = mpinit.GradScaler(optimizer)
    for kind, value in [*actions, ("step", None)]:
        act(model, optimizer, scaler, by_hand, kind, value)
        same(model.parameters(), by_hand.model.parameters())
    same(model.state_dict().values(), by_hand.masters)
    if setting != "split":
        same(masters(optimizer), by_hand.masters)
    mpinit.undo(model)
    same(model.parameters(), by_hand.masters)


@pytest.mark.parametrize("setting", ["O0", "O2", "O5"])
def test_a_closure_with_a_plain_backward(setting: str) -> None:
    def make(parameters: Any) -> LBFGS:
        return LBFGS(parameters, lr=0.1, max_iter=3)

    model = mlp()
    optimizer, by_hand = make(model.parameters()), ByHand(mlp(), setting, make)
    mpinit.initialize(model, optimizer, verbosity=0, **SETTINGS[setting])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mse(model, DATA[0])
        loss.backward()
        return loss

    def closure_by_hand() -> torch.Tensor:
        by_hand.follow()
        by_hand.clear()
        loss = by_hand.backward(DATA[0])
        for master, gradient in zip(by_hand.masters, by_hand.gradients, strict=True):
            master.grad = gradient
        return loss

    for _ in range(2):
        optimizer.step(closure)
        by_hand.optimizer.step(closure_by_hand)
    same(masters(optimizer), by_hand.masters)


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
    mpinit.undo(model)
