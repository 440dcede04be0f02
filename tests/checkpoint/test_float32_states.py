"""States of optimizers are float32 like the masters: also loaded ones, and those of weights that get a master later."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import iterate
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import Optimizer

import mpinit

Factory = Callable[[Any], Optimizer]
MAKE: dict[str, Factory] = {
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters),
    "Adam": lambda parameters: torch.optim.Adam(parameters),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}
STORES: dict[str, dict[str, Any]] = {"full": {}, "split": {"master_weights": "split"}}


def made(make: Factory) -> tuple[nn.Sequential, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, make(model.parameters())


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        iterate((model(x).float() - x[:, :4]).square().mean(), optimizer)


def state_of(optimizer: Optimizer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    index = next(i for i, p in enumerate(optimizer.param_groups[0]["params"]) if p is weight)
    return {name: value for name, value in state[index].items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", MAKE)
def test_state_of_a_weight_frozen_at_initialize_is_float32(name: str, store: str) -> None:
    """The weight was trained in float32 before, so that it has a state, and is unfrozen later."""
    model, optimizer = made(MAKE[name])
    for step in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x[:, :4]).square().mean().backward()
        optimizer.step()
    before = {key: value.clone() for key, value in state_of(optimizer, model[0].weight).items()}
    model[0].weight.requires_grad_(False)
    mpinit.initialize(model, optimizer, "O5", **STORES[store])
    train(model, optimizer, range(3, 5))
    kept = state_of(optimizer, model[0].weight)
    assert {key: value.dtype for key, value in kept.items()} == {key: value.dtype for key, value in before.items()}
    assert all(torch.equal(value, kept[key]) for key, value in before.items())
    model[0].weight.requires_grad_(True)
    train(model, optimizer, range(5, 7))
    assert {value.dtype for value in state_of(optimizer, model[0].weight).values()} == {torch.float32}
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", MAKE)
def test_state_loaded_for_a_frozen_weight_is_float32(name: str, store: str) -> None:
    model, optimizer = made(MAKE[name])
    mpinit.initialize(model, optimizer, "O5", **STORES[store])
    train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(3, 6))
    other, its = made(MAKE[name])
    mpinit.initialize(other, its, "O5", **STORES[store])
    other[0].weight.requires_grad_(False)
    other.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    other[0].weight.requires_grad_(True)
    train(other, its, range(3, 6))
    expected = model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in other.state_dict().items())


class Wrapper(Optimizer):
    """Steps another optimizer, whose groups and state are its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([parameter for group in inner.param_groups for parameter in group["params"]], {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("store", STORES)
def test_a_wrapped_optimizers_own_load_keeps_float32_state(store: str) -> None:
    model, inner = made(MAKE["Adam"])
    optimizer = Wrapper(inner)
    mpinit.initialize(model, optimizer, "O5", **STORES[store])
    train(model, optimizer, range(3))
    saved = copy.deepcopy(inner.state_dict())
    inner.load_state_dict(saved)
    loaded = inner.state_dict()["state"]
    for index, state in saved["state"].items():
        assert all(
            value.dtype is torch.float32 and torch.equal(value, loaded[index][key]) for key, value in state.items()
        )
    mpinit.undo(model)
    assert "load_state_dict" not in vars(inner)


@pytest.mark.filterwarnings("ignore:the eps=1e-08")
@pytest.mark.parametrize("name", ["Adam", "NAdam", "RMSprop", "Adamax", "SGD"])
def test_the_hidden_step_of_dcp_changes_no_weight_at_o3(name: str) -> None:
    """In float16 an eps of 1e-8 is 0, and 0 divided by 0 would be nan."""
    model, optimizer = made(MAKE[name])
    mpinit.initialize(model, optimizer, "O3")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    get_state_dict(model, optimizer)
    assert all(map(torch.equal, model.parameters(), before))
