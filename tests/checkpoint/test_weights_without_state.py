"""A TrainState where some trained weights have no optimizer state: unused, just unfrozen, or just added."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from frameworks import needs
from loops import batches
from models import LEVELS
from states_by_name import assert_same
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Muon, NAdam, Optimizer, RMSprop

import mpinit
from mpinit import TrainState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": partial(AdamW, lr=0.01),
    "momentum": partial(SGD, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "rmsprop": partial(RMSprop, lr=0.001, momentum=0.9),
    "adagrad": partial(Adagrad, lr=0.01),
    "muon": partial(Muon, lr=0.01),
    "nadam": partial(NAdam, lr=0.01),
}
# Of pytorch_optimizer: mpinit steps them whole, so they have no 8-bit states.
OTHERS = {"Lion": 0.001, "Prodigy": 0.1, "ScheduleFreeAdamW": 0.01}
STORES = {name: keywords for name, keywords in LEVELS.items() if name not in ("O3", "O4")}


class TwoHeads(nn.Module):
    """A body and two heads, of which a forward uses those that are asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.Tanh())
        self.one, self.other = nn.Linear(64, 3, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor, heads: str) -> torch.Tensor:
        hidden = self.body(x)
        outputs = [getattr(self, name)(hidden).float() for name in heads.split()]
        return torch.cat(outputs, dim=1).square().mean()


def build(store: str, name: str, seed: int = 0, **kinds: Any) -> tuple[TwoHeads, Optimizer]:
    model = TwoHeads(seed)
    if kinds.get("is_frozen"):
        model.other.weight.requires_grad_(False)
    params = [p for p in model.parameters() if not kinds.get("is_added") or p is not model.other.weight]
    if name in OTHERS:
        optimizer = getattr(needs("pytorch_optimizer"), name)(params, lr=OTHERS[name])
    else:
        optimizer = OPTIMIZERS[name](params)
    mpinit.initialize(model, optimizer, **STORES[store])
    if hasattr(optimizer, "train"):
        optimizer.train()
    return model, optimizer


def train(model: TwoHeads, optimizer: Optimizer, heads: str, count: int, seed: int = 1) -> None:
    for x, _ in batches(count, seed):
        optimizer.zero_grad()
        with mpinit.scale_loss(model(x, heads), optimizer) as loss:
            loss.backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize(
    ("name", "store"),
    [(name, store) for name in (*OPTIMIZERS, *OTHERS) for store in STORES if store != "int8" or name in OPTIMIZERS],
)
def test_unused_layer_resumes_from_a_file_bit_for_bit(name: str, store: str, tmp_path: Path) -> None:
    """Compare with a run that was never saved, after the save and after the load."""
    model, optimizer = build(store, name)
    train(model, optimizer, "one", 2)
    before = everything(model, optimizer)
    train(model, optimizer, "one other", 2, seed=5)
    expected = everything(model, optimizer)
    model, optimizer = build(store, name)
    train(model, optimizer, "one", 2)
    random = torch.get_rng_state()
    dcp.save({"app": TrainState(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert_same(everything(model, optimizer), before, dtype=None)
    train(model, optimizer, "one other", 2, seed=5)
    assert_same(everything(model, optimizer), expected, dtype=None)
    again, resumed = build(store, name, seed=7)
    dcp.load({"app": TrainState(again, resumed)}, checkpoint_id=tmp_path, no_dist=True)
    assert (again.other.weight in resumed.state) == (name == "adagrad")  # which makes it with the optimizer
    train(again, resumed, "one other", 2, seed=5)
    assert_same(everything(again, resumed), expected, dtype=None)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@pytest.mark.parametrize("store", STORES)
def test_weights_that_have_state_here_or_in_the_file_only(store: str, name: str, tmp_path: Path) -> None:
    model, optimizer = build(store, name)
    train(model, optimizer, "one", 2)
    dcp.save({"app": TrainState(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    train(model, optimizer, "one other", 2, seed=5)
    again, resumed = build(store, name, seed=7)
    train(again, resumed, "other", 1, seed=8)
    dcp.load({"app": TrainState(again, resumed)}, checkpoint_id=tmp_path, no_dist=True)
    train(again, resumed, "one other", 2, seed=5)
    assert_same(everything(again, resumed), everything(model, optimizer), dtype=None)


@pytest.mark.parametrize("change", ["is_frozen", "is_added"])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
@pytest.mark.parametrize("store", STORES)
def test_layer_unfrozen_or_added_before_a_save(store: str, name: str, change: str, tmp_path: Path) -> None:
    def changed(seed: int) -> tuple[TwoHeads, Optimizer]:
        model, optimizer = build(store, name, seed, **{change: True})
        if seed == 0:
            train(model, optimizer, "one", 2)
        if change == "is_frozen":
            model.other.weight.requires_grad_(True)
        else:
            optimizer.add_param_group({"params": [model.other.weight]})
        return model, optimizer

    model, optimizer = changed(0)
    train(model, optimizer, "one other", 2, seed=5)
    expected = everything(model, optimizer)
    model, optimizer = changed(0)
    dcp.save({"app": TrainState(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    train(model, optimizer, "one other", 2, seed=5)
    assert_same(everything(model, optimizer), expected, dtype=None)
    again, resumed = changed(7)
    dcp.load({"app": TrainState(again, resumed)}, checkpoint_id=tmp_path, no_dist=True)
    train(again, resumed, "one other", 2, seed=5)
    assert_same(everything(again, resumed), expected, dtype=None)


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
def test_weights_without_state_are_named_in_every_form(options: dict[str, bool]) -> None:
    asked = StateDictOptions(**options)
    model, optimizer = build("O2", "adamw")
    train(model, optimizer, "one", 2)
    state = copy.deepcopy(TrainState(model, optimizer, options=asked).state_dict())
    assert state["initial"] == ["state.other.weight"]
    again, resumed = build("O2", "adamw", seed=7)
    TrainState(again, resumed, options=asked).load_state_dict(state)
    assert set(resumed.state) == {*again.body.parameters(), again.one.weight}


def test_saving_runs_no_hooks_of_the_step_and_keeps_gradients() -> None:
    model, optimizer = build("O2", "adamw")
    train(model, optimizer, "one", 1)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(0))
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with mpinit.scale_loss(model(batches(1)[0][0], "one other"), optimizer) as loss:
        loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    TrainState(model, optimizer).state_dict()
    assert not calls and mpinit.step_counts(optimizer) == (1, 0)
    assert all(weight.grad is grad for weight, grad in zip(model.parameters(), gradients, strict=True))
    optimizer.step()
    assert calls == [0, 1]


@pytest.mark.parametrize("store", STORES)
def test_values_of_an_evaluation_are_saved_and_lose_no_bits(store: str) -> None:
    """Overwrite weights, save, and write the old values back: masters have all their bits."""
    model, optimizer = build(store, "adamw")
    train(model, optimizer, "one", 2)
    before = copy.deepcopy(model.state_dict())
    weights = list(optimizer.state)
    trained = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        torch._foreach_mul_(weights, 0.9)
        TrainState(model, optimizer).state_dict()
        torch._foreach_copy_(weights, trained)
    assert_same(model.state_dict(), before, dtype=None)


def test_state_that_cannot_be_read_from_a_file_is_refused(tmp_path: Path) -> None:
    """LBFGS makes no state without a closure, so that a file's was not asked for."""

    def made(seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=3)
        mpinit.initialize(model, optimizer, opt_level="O5")
        return model, optimizer

    def train(model: nn.Module, optimizer: Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.eye(4)).float() - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    model, optimizer = made(0)
    train(model, optimizer)
    state = TrainState(model, optimizer)
    dcp.save({"app": state}, checkpoint_id=tmp_path, no_dist=True)
    again, resumed = made(1)
    with pytest.raises(ValueError, match=r"could not read the state that LBFGS had .* by torch.save instead.*'weight'"):
        dcp.load({"app": TrainState(again, resumed)}, checkpoint_id=tmp_path, no_dist=True)
    again, resumed = made(1)
    TrainState(again, resumed).load_state_dict(copy.deepcopy(state.state_dict()))
    for pair in ((model, optimizer), (again, resumed)):
        train(*pair)
    assert_same(again.state_dict(), model.state_dict(), dtype=None)


def test_weight_frozen_where_it_was_saved_starts_without_state() -> None:
    model, optimizer = build("O2", "adamw", is_frozen=True)
    train(model, optimizer, "one", 2)
    state = copy.deepcopy(TrainState(model, optimizer).state_dict())
    assert state["initial"] == ["state.other.weight"]
    again, resumed = build("O2", "adamw", seed=7)
    TrainState(again, resumed).load_state_dict(state)
    train(again, resumed, "one other", 1)
    assert resumed.state[again.other.weight]["step"] == 1
