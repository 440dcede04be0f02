"""A TrainState before the first step: asking for it keeps weights and groups, and a run resumes from it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import adam, batches, mlp, train, train_plainly
from models import LEVELS
from states_by_name import assert_same
from torch import nn
from torch.optim import ASGD, SGD, NAdam, Optimizer, Rprop

import mpinit
from mpinit import TrainState


class Averaging(Optimizer):
    """Counts steps in its groups, and weighs updates by the count, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "weights": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            group["weights"] += group["count"]
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    if not state:
                        state["sum"] = weight.detach().clone()
                    state["sum"].sub_(weight.grad, alpha=group["lr"])
                    weight.lerp_(state["sum"], 1 / group["weights"])


class Counting(Optimizer):
    """Counts steps in its groups and in an attribute, both made by the first step, and warms up by the counts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    state["mean"] = state.get("mean", torch.zeros_like(weight)).lerp_(weight.grad, 0.5)
                    weight.sub_(state["mean"], alpha=group["lr"] / group["step"] / self.count)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "nadam": lambda params: NAdam(params, lr=0.01),
    "rprop": lambda params: Rprop(params, lr=0.01),
    "asgd": lambda params: ASGD(params, lr=0.1),
    "dampening": lambda params: SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "averaging": Averaging,
    "counting": Counting,
}


def build(level: str, make: Callable[[Any], Optimizer], seed: int = 0) -> tuple[nn.Module, Optimizer]:
    model = mlp(seed)
    optimizer = make(model.parameters())
    mpinit.initialize(model, optimizer, **LEVELS[level])
    return model, optimizer


@pytest.mark.parametrize("level", ["O0", "O2", "split", "model"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_run_resumed_from_before_its_first_step_is_the_same(name: str, level: str) -> None:
    model, optimizer = build(level, OPTIMIZERS[name])
    train(model, optimizer, batches(3))
    expected = copy.deepcopy(model.state_dict())
    model, optimizer = build(level, OPTIMIZERS[name])
    saved = copy.deepcopy(TrainState(model, optimizer).state_dict())
    assert mpinit.step_counts(optimizer) == (0, 0)
    train(model, optimizer, batches(3))
    assert_same(model.state_dict(), expected, dtype=None)
    again, resumed = build(level, OPTIMIZERS[name], seed=7)
    TrainState(again, resumed).load_state_dict(saved)
    train(again, resumed, batches(3))
    assert_same(again.state_dict(), expected, dtype=None)


def test_plain_optimizer_without_a_step_resumes_too() -> None:
    model, again = mlp(), mlp(7)
    optimizer, resumed = (OPTIMIZERS["nadam"](each.parameters()) for each in (model, again))
    TrainState(again, resumed).load_state_dict(copy.deepcopy(TrainState(model, optimizer).state_dict()))
    for pair in ((model, optimizer), (again, resumed)):
        train_plainly(*pair, batches(3))
    assert_same(again.state_dict(), model.state_dict(), dtype=None)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_only_optimizers_without_a_step_start_anew(level: str) -> None:
    model, other = mlp(), mlp(1)
    optimizers = [adam(other.parameters()), OPTIMIZERS["nadam"](model.parameters())]
    both = nn.ModuleList([model, other])
    mpinit.initialize(both, optimizers, **LEVELS[level])
    train(other, optimizers[0], batches(2))
    state = TrainState(both, optimizers)
    saved = copy.deepcopy(state.state_dict())
    train(model, optimizers[1], batches(2))
    state.load_state_dict(saved)
    assert optimizers[0].state and not optimizers[1].state
    assert mpinit.state_dict(optimizers[0])["loss_scaler0"].get("scales", True) == (level == "O2")


class ByNorm(Optimizer):
    """Steps by a gradient over its norm, which is 0 / 0 when torch makes state; may count beside them."""

    steps_per_parameter = True

    def __init__(self, params: Any, counts: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.counts = counts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.counts:
            self.state["count"] = {"step": torch.tensor(1.0)}
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.state[weight]["norm"] = weight.grad.norm()
                    weight.sub_(weight.grad / weight.grad.norm(), alpha=group["lr"])


@pytest.mark.parametrize("level", LEVELS)
def test_state_before_the_first_step_changes_no_weight(level: str) -> None:
    model, optimizer = build(level, ByNorm)
    before = [parameter.detach().clone() for parameter in mpinit.master_params(optimizer)]
    state = TrainState(model, optimizer).state_dict()
    assert all(value.isfinite().all() for value in state["model"].values())
    after = list(mpinit.master_params(optimizer))
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_state_that_belongs_to_no_parameter_is_refused_by_its_key() -> None:
    model, optimizer = build("O2", lambda params: ByNorm(params, counts=True))
    with pytest.raises(ValueError, match="ByNorm keeps state of no parameter, under 'count'"):
        TrainState(model, optimizer).state_dict()
