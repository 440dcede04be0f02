"""torch.distributed.checkpoint: model and optimizer states by name, as those of a float32 model, at every level."""

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import states_by_name as by_name
import torch
import torch.distributed.checkpoint as dcp
from loops import backward, batches, masters, mse, same, train, train_plainly
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.optim import SGD, Adam, Optimizer

import mpinit

pytestmark = pytest.mark.usefixtures("group_of_one")


@pytest.mark.parametrize("options", by_name.OPTIONS)
@pytest.mark.parametrize("level", by_name.LEVELS)
def test_a_state_is_a_float32_models_and_holds_the_masters_bits(level: str, options: str) -> None:
    model, optimizer = by_name.build(level)
    train(model, optimizer, batches(3))
    state = by_name.saved(model, optimizer, options)
    plain, plain_optimizer = by_name.build(None, seed=5)
    train_plainly(plain, plain_optimizer, batches(1))
    assert by_name.entries(by_name.saved(plain, plain_optimizer, options)).keys() == by_name.entries(state).keys()
    # torch cannot load a flat state as a full one.
    by_name.load(state, plain, plain_optimizer, options.replace("flat, full", "flat"))
    by_name.assert_same(by_name.saved(plain, plain_optimizer, options), state)
    mpinit.undo(model)
    same(model.parameters(), plain.parameters())


@pytest.mark.parametrize("name", by_name.OPTIMIZERS)
@pytest.mark.parametrize("options", ["plain", "full", "flat"])
@pytest.mark.parametrize("level", by_name.LEVELS)
def test_resuming_changes_no_bit(level: str, options: str, name: str) -> None:
    data = batches(6)
    model, optimizer = by_name.build(level, name)
    train(model, optimizer, data[:3])
    state, scalers = by_name.saved(model, optimizer, options), mpinit.state_dict(optimizer)
    train(model, optimizer, data[3:])
    end = by_name.saved(model, optimizer)
    mpinit.undo(model)
    again, resumed = by_name.build(level, name, seed=9)
    by_name.load(state, again, resumed, options)
    mpinit.load_state_dict(scalers, resumed)
    train(again, resumed, data[3:])
    by_name.assert_same(by_name.saved(again, resumed), end)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("level", by_name.WITH_MASTERS)
def test_files_are_read_into_the_state_of_a_fresh_model(level: str, tmp_path: Path) -> None:
    model, optimizer = by_name.build(level)
    train(model, optimizer, batches(3))
    written = by_name.saved(model, optimizer)
    files = {"checkpoint_id": tmp_path / "checkpoint", "no_dist": True}
    dcp.save(dict(zip(("model", "optimizer"), written, strict=True)), **files)
    again, resumed = by_name.build(level, seed=6)
    # dcp.load writes into these, which is into full masters themselves.
    ours, theirs = torchs.get_state_dict(again, resumed)
    dcp.load({"model": ours, "optimizer": theirs}, **files)
    torchs.set_state_dict(again, resumed, model_state_dict=ours, optim_state_dict=theirs)
    by_name.assert_same(by_name.saved(again, resumed), written)
    train(model, optimizer, batches(2, seed=8))
    end = by_name.saved(model, optimizer)
    mpinit.load_state_dict(mpinit.state_dict(optimizer), resumed)
    train(again, resumed, batches(2, seed=8))
    by_name.assert_same(by_name.saved(again, resumed), end)


@pytest.mark.filterwarnings("error", "ignore:the eps=")
@pytest.mark.parametrize("level", [*by_name.LEVELS, "O3"])
def test_what_a_full_state_lacks_keeps_its_bits(level: str) -> None:
    model, _ = by_name.build(level)
    before = torchs.get_model_state_dict(model)
    kept = {name: value.clone() for name, value in before.items() if name != "head.weight"}
    options = torchs.StateDictOptions(full_state_dict=True, strict=False)
    torchs.set_model_state_dict(model, {"head.weight": torch.full((3, 6), 1.25)}, options=options)
    after = torchs.get_model_state_dict(model)
    assert torch.equal(after.pop("head.weight"), torch.full((3, 6), 1.25))
    by_name.assert_same(after, kept)


@pytest.mark.parametrize("level", by_name.WITH_MASTERS)
def test_a_state_that_does_not_fit_is_refused_as_in_torch(level: str) -> None:
    model, optimizer = by_name.build(level)
    train(model, optimizer, batches(1))
    before = by_name.saved(model, optimizer)
    state = copy.deepcopy(before[1])
    del state["state"]["head.weight"]
    entered = masters(optimizer)
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        torchs.set_optimizer_state_dict(model, optimizer, state)
    by_name.assert_same(by_name.saved(model, optimizer), before)
    same(masters(optimizer), entered)
    train(model, optimizer, batches(1))


def assert_entered(model: nn.Module, optimizer: Optimizer, entered: list[list[nn.Parameter]]) -> None:
    assert all(p.grad is None for p in [*model.parameters(), *itertools.chain(*entered)])
    assert [[*map(id, group["params"])] for group in optimizer.param_groups] == [[*map(id, group)] for group in entered]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [*by_name.OPTIMIZERS, "sgd"])
@pytest.mark.parametrize("level", by_name.LEVELS)
def test_state_is_made_as_in_torch_and_nothing_else_moves(level: str, name: str) -> None:
    make = (by_name.OPTIMIZERS | {"sgd": functools.partial(SGD, lr=0.1, weight_decay=0.1)})[name]
    model, plain = by_name.Net(), by_name.Net()
    optimizer, theirs = make(by_name.groups(model)), make(by_name.groups(plain))
    mpinit.initialize(model, optimizer, **by_name.LEVELS[level])
    for parameter, own in zip(plain.parameters(), model.parameters(), strict=True):
        if not parameter.requires_grad:
            parameter.copy_(own)  # a frozen weight keeps its rounding
    weights, ours = [parameter.detach().clone() for parameter in model.parameters()], copy.deepcopy(model.state_dict())
    entered = [list(group["params"]) for group in optimizer.param_groups]
    scalers, calls = mpinit.state_dict(optimizer), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    by_name.assert_same(by_name.saved(model, optimizer), by_name.saved(plain, theirs))
    assert len(calls) == 1
    assert mpinit.step_counts(optimizer) == (0, 0)
    assert mpinit.state_dict(optimizer) == scalers
    same(model.parameters(), weights)
    same(model.state_dict().values(), ours.values())
    assert_entered(model, optimizer, entered)
    train(model, optimizer, batches(1))


@pytest.mark.parametrize("level", by_name.WITH_MASTERS)
def test_earlier_overflow_does_not_affect_the_state(level: str) -> None:
    model, optimizer = by_name.build(level)
    backward(mse(model, batches(1)[0]) * float("inf"), optimizer)
    model.zero_grad()
    state = torchs.get_optimizer_state_dict(model, optimizer)["state"]
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


@pytest.mark.parametrize("level", by_name.LEVELS)
def test_failure_while_train_state_makes_state_changes_nothing(level: str) -> None:
    model = by_name.Net()
    optimizer = Failing(by_name.groups(model), lr=0.01)
    mpinit.initialize(model, optimizer, **by_name.LEVELS[level])
    before = copy.deepcopy(model.state_dict())
    entered = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(ArithmeticError):
        mpinit.TrainState(model, optimizer).state_dict()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    assert not optimizer.state
    assert_entered(model, optimizer, entered)
    same(model.state_dict().values(), before.values())
    optimizer.fails = False
    mpinit.TrainState(model, optimizer).state_dict()
