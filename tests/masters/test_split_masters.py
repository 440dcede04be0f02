"""Split masters: training is that of full float32 masters with the same rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import backward, iterate
from torch import nn

import mpinit
from mpinit.masters.float_split import take_remainder_


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(4 * 16, 16), nn.Tanh(), nn.Linear(16, 4)),
    )
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(step))


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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        iterate(model(batch(step)).square().mean(), optimizer)


def half_away(values: torch.Tensor) -> torch.Tensor:
    bits = values.flatten().clone().view(torch.int32)
    take_remainder_(bits, torch.empty(bits.shape, dtype=torch.int16))
    return bits.to(torch.int16).view(torch.bfloat16).view(values.shape)


def by_hand(make: Factory, steps: int) -> dict[str, torch.Tensor]:
    """Full float32 masters in a plain loop, rounded into bfloat16 weights half away from zero."""
    model = net()
    masters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    kept = {name for name in masters if name.startswith("1.")}  # BatchNorm stays float32
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if name not in kept:
            weight.data = weight.detach().bfloat16()
    optimizer = make([weights[name] if name in kept else masters[name] for name in masters])
    for step in range(steps):
        for name in masters:
            if name not in kept:
                weights[name].data.copy_(half_away(masters[name].detach()))
            weights[name].grad = None
        model(batch(step).bfloat16()).float().square().mean().backward()
        for name in masters:
            if name not in kept:
                masters[name].grad = weights[name].grad.float()  # type: ignore[union-attr]
        optimizer.step()
    return {name: (weights[name] if name in kept else masters[name]).detach() for name in masters}


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
    train(model, optimizer, steps)
    state = model.state_dict()
    for parameter, expected in by_hand(OPTIMIZERS[name], steps).items():
        assert torch.equal(state[parameter], expected), parameter


def test_a_group_added_later_is_split_too() -> None:
    model, optimizer = initialized(OPTIMIZERS["Adam"])
    extra = nn.Linear(4, 2).bfloat16()
    optimizer.add_param_group({"params": list(extra.parameters())})
    backward(extra(model(batch(0)).bfloat16()).float().sum(), optimizer)
    before = extra.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(extra.weight, before)
    assert optimizer.state[extra.weight]["exp_avg"].dtype == torch.float32
    mpinit.undo(model)
    assert extra.weight.dtype == torch.float32
    assert not torch.equal(extra.weight, extra.weight.bfloat16().float()), "with its remainder"
