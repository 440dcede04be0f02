"""The stores of masters: full and split, what they cost, and what becomes of weights that are written to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import Batch, backward, iterate, masters, mlp, mse, same, start
from masters_by_hand import ByHand
from torch import nn

import mpinit

pytestmark = pytest.mark.device


def test_tiny_updates_add_up_in_the_masters() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = start(model, "O2", torch.bfloat16, lambda p: torch.optim.SGD(p, lr=2.0**-12))
    for _ in range(32):
        iterate(model(torch.ones(1, 1)).sum(), optimizer)
    # A step of 2**-12 is lost on a bfloat16 weight of 1; 32 of them are not on its master.
    assert masters(optimizer)[0].item() == 1 - 32 * 2.0**-12
    assert model.weight.item() == 1 - 2.0**-7


def test_finite_weights_beyond_float16_are_clamped_with_one_warning_and_come_back() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0], model[0].weight[0, 1] = 1e6, float("inf")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match=r"0\.weight are beyond") as caught:
        start(model, "O2", torch.float16)
    assert len(caught) == 1
    assert model[0].weight[0, :2].tolist() == [65504.0, float("inf")]
    same(model.state_dict().values(), before)
    mpinit.undo(model)
    same(model.parameters(), before)


def growing(start: float) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """One weight that a step makes larger by 1000, in float16."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[start, 1.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1000.0)
    mpinit.initialize(model, optimizer, "O2", init_loss_scale=2.0, verbosity=0)
    return model, optimizer


def grow(model: nn.Linear, optimizer: torch.optim.Optimizer, square: bool) -> None:
    """One step of :func:`growing`; an infinite weight makes gradients nan where the loss has a square in it."""
    optimizer.zero_grad()
    output = model(torch.tensor([[1.0, 0.0]]))
    loss = -output.sum() + (0.0 * output.square().sum() if square else 0.0)
    backward(loss, optimizer)
    optimizer.step()


@pytest.mark.filterwarnings("ignore:finite values of weight")
def test_what_was_clamped_at_the_start_stays_clamped() -> None:
    model, optimizer = growing(1e5)
    for _ in range(3):
        grow(model, optimizer, square=False)
    assert model.weight.tolist() == [[65504.0, 1.0]]
    assert masters(optimizer)[0].tolist() == [[103000.0, 1.0]]
    mpinit.undo(model)
    assert model.weight.tolist() == [[103000.0, 1.0]]


def test_weights_that_grow_beyond_float16_are_noticed_at_the_skipped_step_and_clamped() -> None:
    model, optimizer = growing(64000.0)
    grow(model, optimizer, square=True)
    assert model.weight.tolist() == [[64992.0, 1.0]]
    grow(model, optimizer, square=True)
    with pytest.warns(UserWarning, match="weight grew beyond the largest float16"):
        grow(model, optimizer, square=True)
    assert mpinit.step_counts(optimizer) == (2, 1)
    for _ in range(2):
        grow(model, optimizer, square=True)
        assert model.weight.tolist() == [[65504.0, 1.0]]
    assert mpinit.step_counts(optimizer) == (4, 1)
    assert masters(optimizer)[0].tolist() == [[68000.0, 1.0]]


def test_loaded_numbers_beyond_float16_are_clamped() -> None:
    model, optimizer = growing(1.0)
    model.load_state_dict({"weight": torch.tensor([[1e5, 1.0]])})
    assert model.weight.tolist() == [[65504.0, 1.0]]
    grow(model, optimizer, square=True)
    assert model.weight.tolist() == [[65504.0, 1.0]]
    assert model.state_dict()["weight"].tolist() == [[101000.0, 1.0]]


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
