"""Optimizers that change under way: groups added and removed, unfreezing, state from before, and orphans."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import (
    backward,
    batches,
    close,
    follow,
    keywords,
    masters,
    mlp,
    momentum,
    mse,
    plain_sgd,
    same,
    start,
    train,
    train_plainly,
)
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import mpinit

LEVELS = ("O0", "O1", "O2", "O3")

# -- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_group_from_outside_the_models_may_have_any_dtype(dtype: torch.dtype) -> None:
    model, batch = mlp(), batches(1)[0]
    optimizer = start(model, "O2", torch.float16, plain_sgd)
    extra = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer.add_param_group({"params": extra})
    backward(mse(model, batch) + (extra.float() * 0.5).sum(), optimizer)
    optimizer.step()
    assert masters(optimizer)[-1].tolist() == [0.5] * 3 == extra.detach().float().tolist()
    assert masters(optimizer)[-1].dtype == torch.float32 and extra.dtype == dtype


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_cannot_be_added_a_second_time(level: str) -> None:
    model = mlp()
    optimizer = start(model, level)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model[0].weight]})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, batches(2))
    assert level != "O2" or follow(model, optimizer) is None


# -- freezing, and types that mix ----------------------------------------------------------------------------------


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
    backward(mse(model, batches(1)[0]), optimizer)
    optimizer.step()
    after = model.state_dict()["0.weight"]
    assert not torch.equal(after, before) and not torch.equal(after, after.to(model[0].weight.dtype).float())
    assert optimizer.state[model[0].weight]["momentum_buffer"].dtype is torch.float32


class Adapted(nn.Module):
    """A 16-bit base with adapters in float32 and in the other 16-bit type, as parameter-efficient tuning has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(6, 3)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + self.up(self.down(inputs)) + self.shift.to(inputs.dtype)


@pytest.mark.parametrize("make", [momentum, lambda p: Adam(p, lr=0.01), lambda p: AdamW(p, lr=0.01, fused=True)])
def test_dtypes_may_mix_in_one_group(make: Callable[..., Optimizer]) -> None:
    model, reference, data = Adapted(), Adapted(), batches(5)
    optimizer, plain = make(model.parameters()), make(reference.parameters())
    mpinit.initialize(model, optimizer, keep_fp32=["down", "up"], **keywords("O2"))
    model.shift.data = model.shift.data.bfloat16()
    dtypes = [p.dtype for p in (model.base.weight, model.down.weight, model.shift)]
    assert dtypes == [torch.float16, torch.float32, torch.bfloat16]
    train(model, optimizer, data)
    train_plainly(reference, plain, data)
    close(model.state_dict().values(), reference.parameters(), 0.02)
    assert {p.dtype for p in masters(optimizer)} == {torch.float32}


# -- state that was there before ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [momentum, lambda p: Adam(p, lr=0.01), lambda p: AdamW(p, lr=0.01, fused=True)])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_optimizer_that_has_stepped_keeps_its_state(level: str, make: Callable[..., Optimizer]) -> None:
    model, reference, data = mlp(), mlp(), batches(6)
    optimizer, plain = make(model.parameters()), make(reference.parameters())
    train_plainly(model, optimizer, data[:3])
    train_plainly(reference, plain, data[:3])
    before = [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    mpinit.initialize(model, optimizer, **keywords(level))
    after = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    same(after, before)
    train(model, optimizer, data[3:])
    train_plainly(reference, plain, data[3:])
    close(masters(optimizer), reference.parameters(), 0.02)


# -- parameters of no model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_over_none_of_the_models_parameters_is_refused(level: str) -> None:
    model, own = mlp(), momentum(mlp().parameters())
    copied, strange = momentum(mlp(seed=5).parameters()), SGD([nn.Parameter(torch.zeros(5))], lr=0.5)
    left_over = r"none of the parameters of SGD.*'0\.weight'.*'0\.bias'.*'3\.weight'.*make the optimizer from"
    for optimizers, text in (
        (copied, left_over),
        ([own, copied], left_over),
        (strange, r"make the optimizer from.*a loss"),
    ):
        with pytest.raises(ValueError, match=text):
            mpinit.initialize(model, optimizers, **keywords(level))
    assert model[0].weight.dtype is torch.float32
    mpinit.initialize(model, strange, await_optimizers=True, **keywords(level))


def test_a_loss_functions_own_parameters_are_no_orphans() -> None:
    model, center = mlp(), nn.Parameter(torch.zeros(5))
    optimizer = SGD([center], lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mpinit.initialize(model, [momentum(model.parameters()), optimizer], **keywords("O2"))
    backward((center - 1).pow(2).sum() / 2, optimizer)
    optimizer.step()
    assert center.tolist() == [0.5] * 5
