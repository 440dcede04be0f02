"""Split masters: training is that of full float32 masters with the same rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import Batch, backward, iterate, mse, same
from masters_by_hand import ByHand
from torch import nn

import mpinit

pytestmark = pytest.mark.device


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(4 * 16, 16), nn.Tanh(), nn.Linear(16, 4)),
    )
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def batch(step: int) -> Batch:
    return torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(step)), torch.zeros(8, 4)


Factory = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Factory] = {
    "SGD momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-2),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "NAdam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
}


def initialized(make: Factory, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = make(model.parameters())
    mpinit.initialize(model, optimizer, "O5", verbosity=0, **{"master_weights": "split", **more})
    return model, optimizer


# A bit that differs does so within a few steps; what only many steps show, two optimizers show.
LONG = ("SGD momentum", "Adam")


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, 200 if name in LONG else 40) for name in OPTIMIZERS),
        *(pytest.param(name, 200, marks=pytest.mark.nightly) for name in OPTIMIZERS if name not in LONG),
    ],
)
def test_many_steps_equal_full_masters_bit_for_bit(name: str, steps: int) -> None:
    model, optimizer = initialized(OPTIMIZERS[name], split_bucket_bytes=1024)
    by_hand = ByHand(net(), "split", OPTIMIZERS[name])
    for step in range(steps):
        iterate(mse(model, batch(step)), optimizer)
        by_hand.clear()
        by_hand.backward(batch(step))
        by_hand.step()
    same(model.state_dict().values(), by_hand.masters)


def test_a_group_added_later_is_split_too() -> None:
    model, optimizer = initialized(OPTIMIZERS["Adam"])
    extra = nn.Linear(4, 2).bfloat16()
    optimizer.add_param_group({"params": list(extra.parameters())})
    backward(extra(model(batch(0)[0]).bfloat16()).float().sum(), optimizer)
    before = extra.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(extra.weight, before)
    assert optimizer.state[extra.weight]["exp_avg"].dtype == torch.float32
    mpinit.undo(model)
    assert extra.weight.dtype == torch.float32
    assert not torch.equal(extra.weight, extra.weight.bfloat16().float()), "with its remainder"
