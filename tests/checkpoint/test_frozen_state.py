"""Weights that are frozen where a ``TrainState`` is loaded keep their optimizer's state."""

import copy
from typing import Any

import pytest
import torch
from loops import backward, batches, mlp, mse
from models import ways
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import AdamW

import mpinit

DATA = batches(8)
KINDS = ways("O0", "O5", "split") | ways("O1", "O2", loss_scale=128.0)


def made(kind: str, frozen: str | None = None) -> tuple[nn.Sequential, AdamW]:
    model = mlp()
    model[0].weight.requires_grad_(frozen != "before")
    optimizer = AdamW(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, **KINDS[kind])
    model[0].weight.requires_grad_(frozen is None)
    return model, optimizer


def train(model: nn.Sequential, optimizer: AdamW, data: Any) -> None:
    for batch in data:
        optimizer.zero_grad()
        backward(mse(model, batch), optimizer)
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
@pytest.mark.parametrize("frozen", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_weight_trained_again_after_loading_goes_on(kind: str, frozen: str, options: dict[str, bool]) -> None:
    asked = StateDictOptions(**options)
    model, optimizer = made(kind)
    train(model, optimizer, DATA[:4])
    state = copy.deepcopy(mpinit.TrainState(model, optimizer, options=asked).state_dict())
    again, its = made(kind, frozen)
    mpinit.TrainState(again, its, options=asked).load_state_dict(state)
    moments = its.state[again[0].weight]
    assert torch.equal(moments["exp_avg"], optimizer.state[model[0].weight]["exp_avg"]) and moments["step"] == 4
    again[0].weight.requires_grad_(True)
    train(model, optimizer, DATA[4:])
    train(again, its, DATA[4:])
    # A weight that is frozen when it is cast keeps its rounding.
    rounded = 2.0**-6 if frozen == "before" and kind != "O0" else 0.0
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=rounded, atol=rounded)


def test_frozen_weights_are_ignored_where_that_is_asked() -> None:
    model, optimizer = made("O0")
    train(model, optimizer, DATA[:1])
    state = mpinit.TrainState(model, optimizer).state_dict()
    again, its = made("O0", "before")
    options = StateDictOptions(ignore_frozen_params=True)
    mpinit.TrainState(again, its, options=options).load_state_dict(state)
    assert not its.state.get(again[0].weight)


def test_frozen_weights_that_are_ignored_keep_their_state() -> None:
    model, optimizer = made("O5")
    train(model, optimizer, DATA[:1])
    state = copy.deepcopy(mpinit.TrainState(model, optimizer).state_dict())
    del state["optim"]["state"]["0.weight"]
    train(model, optimizer, DATA[1:2])
    before = optimizer.state[model[0].weight]["exp_avg"].clone()
    model[0].weight.requires_grad_(False)
    options = StateDictOptions(ignore_frozen_params=True)
    mpinit.TrainState(model, optimizer, options=options).load_state_dict(state)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], before)
    assert optimizer.state[model[0].bias]["step"] == 1
