"""torch.distributed.checkpoint asks an optimizer without state: it is made as in torch, and nothing else moves."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
from loops import backward, batches, mse, same, train
from states_by_name import LEVELS, OPTIMIZERS, WITH_MASTERS, Net, assert_same, build, groups, saved
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, Adam, Optimizer

import mpinit

pytestmark = pytest.mark.usefixtures("group_of_one")


def assert_entered(optimizer: Optimizer, entered: list[list[nn.Parameter]]) -> None:
    assert [[*map(id, group["params"])] for group in optimizer.param_groups] == [[*map(id, group)] for group in entered]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [*OPTIMIZERS, "sgd"])
@pytest.mark.parametrize("level", LEVELS)
def test_state_is_made_as_in_torch_and_nothing_else_moves(level: str, name: str) -> None:
    make = (OPTIMIZERS | {"sgd": functools.partial(SGD, lr=0.1, weight_decay=0.1)})[name]
    model, plain = Net(), Net()
    optimizer, theirs = make(groups(model)), make(groups(plain))
    mpinit.initialize(model, optimizer, **LEVELS[level])
    weights, ours = copy.deepcopy([*model.parameters()]), copy.deepcopy(model.state_dict())
    entered = [list(group["params"]) for group in optimizer.param_groups]
    scalers, calls = mpinit.state_dict(optimizer), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert_same(saved(model, optimizer), saved(plain, theirs))
    assert len(calls) == 1
    assert mpinit.step_counts(optimizer) == (0, 0)
    assert mpinit.state_dict(optimizer) == scalers
    same(model.parameters(), weights)
    same(model.state_dict().values(), ours.values())
    assert all(p.grad is None for p in [*model.parameters(), *itertools.chain(*entered)])
    assert_entered(optimizer, entered)
    train(model, optimizer, batches(1))


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_an_overflow_before_counts_for_nothing(level: str) -> None:
    model, optimizer = build(level)
    backward(mse(model, batches(1)[0]) * float("inf"), optimizer)
    model.zero_grad()
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert {entry["step"].item() for entry in state.values()} == {1.0}
    assert mpinit.step_counts(optimizer) == (0, 0)


class Failing(Adam):
    """Makes its state and part of a step, and fails."""

    steps_per_parameter = True
    fails = True

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.fails:
            raise ArithmeticError


@pytest.mark.parametrize("level", LEVELS)
def test_a_failure_while_a_train_state_makes_it_leaves_everything_as_it_was(level: str) -> None:
    model = Net()
    optimizer = Failing(groups(model), lr=0.01)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    before = copy.deepcopy(model.state_dict())
    entered = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(ArithmeticError):
        mpinit.TrainState(model, optimizer).state_dict()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    assert not optimizer.state
    assert all(p.grad is None for p in [*model.parameters(), *itertools.chain(*entered)])
    assert_entered(optimizer, entered)
    same(model.state_dict().values(), before.values())
    optimizer.fails = False
    mpinit.TrainState(model, optimizer).state_dict()
