"""Everything has an undo: snapshot, initialize, train, undo, and nothing is different."""

import gc
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame
import torch.distributed.checkpoint.state_dict
import torch.optim.swa_utils
from models import CASES, LEVELS, train, train_plainly
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from undo_snapshots import KINDS, Snapshot, end_dropped_sessions, rounds, set_up

import mpinit
from mpinit.initialization import start

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def _no_dropped_sessions() -> None:
    end_dropped_sessions()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("network", "optimizer"), [("cnn", "sgd"), ("lstm", "adam"), ("transformer", "adamw_fused")])
def test_undo_without_training_leaves_no_trace(network: str, optimizer: str, kind: str) -> None:
    model, trainer = set_up(network, optimizer)
    before = Snapshot(model, trainer)
    mpinit.initialize(model, trainer, **KINDS[kind])
    mpinit.undo(model)
    before.check(rounds(kind, model))


@pytest.mark.parametrize("kind", KINDS)
def test_undo_after_training_gives_the_masters_bits_to_the_model(kind: str) -> None:
    model, optimizer = set_up()
    before = Snapshot(model, optimizer)
    mpinit.initialize(model, optimizer, **KINDS[kind])
    train(model, optimizer, CASES["cnn"].batches(3), CASES["cnn"].loss)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    mpinit.undo(optimizer)
    before.check(but=": _buffers" if kind == "O3" else "nothing")
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in trained.items())
    losses = train_plainly(model, optimizer, CASES["cnn"].batches(2), CASES["cnn"].loss)
    assert all(loss == loss for loss in losses), "and trains on in plain torch"


@pytest.mark.parametrize("kind", KINDS)
def test_initialize_again_after_undo_at_any_other_level(kind: str) -> None:
    model, optimizer = set_up()
    case = CASES["cnn"]
    for other in (kind, "O2", kind, "O1", kind):
        mpinit.initialize(model, optimizer, **KINDS[other])
        losses = train(model, optimizer, case.batches(1), case.loss)
        assert losses[0] == losses[0]
        mpinit.undo(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize(
    ("one", "two"), [("O1", "O1"), ("O1", "O4"), ("O2", "O1"), ("O2", "O5"), ("O1 apex policy", "O1")]
)
def test_two_sessions_are_undone_in_any_order(one: str, two: str, first_out: int) -> None:
    pairs = [set_up("cnn"), set_up("transformer")]
    before = [Snapshot(*pair) for pair in pairs]
    for (model, optimizer), kind in zip(pairs, (one, two), strict=True):
        if kind == "O1 apex policy":
            start(model, optimizer, "O1", {}, cast_policy="apex")
        else:
            mpinit.initialize(model, optimizer, **KINDS[kind])
    for (model, optimizer), network in zip(pairs, ("cnn", "transformer"), strict=True):
        train(model, optimizer, CASES[network].batches(1), CASES[network].loss)
    mpinit.undo(pairs[first_out][0])
    other, network = pairs[1 - first_out], ("cnn", "transformer")[1 - first_out]
    train(*other, CASES[network].batches(1), CASES[network].loss)
    mpinit.undo(other[1])
    for snapshot in before:
        snapshot.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_built_before_and_after(when: str, kind: str) -> None:
    model, optimizer = set_up(warm=False)
    case = CASES["cnn"]
    if when == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    mpinit.initialize(model, optimizer, **KINDS[kind])
    if when == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    first = optimizer.param_groups[0]["lr"]
    for rounds_done in range(1, 4):
        if rounds_done == 3:
            mpinit.undo(model)
            train_plainly(model, optimizer, case.batches(1), case.loss)
        else:
            train(model, optimizer, case.batches(1), case.loss)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == first * 0.5**rounds_done


@pytest.mark.parametrize("kind", ["O2", "O5 split"])
def test_undo_restores_original_dtypes(kind: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine = nn.Parameter(torch.full((3,), 0.1, dtype=torch.float64))
            self.coarse = nn.Parameter(torch.full((3,), 0.1, dtype=torch.bfloat16))
            self.register_buffer("wide", torch.ones(3, dtype=torch.float64))

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **KINDS[kind])
    mpinit.undo(model)
    assert model.wide.dtype is torch.float64
    assert model.fine.dtype is torch.float64
    assert model.coarse.dtype is torch.float32, "what was 16-bit keeps its master's bits"


@pytest.mark.parametrize("kind", ["O2", "O3", "O5", "O5 split"])
def test_training_inside_an_autocast_block(kind: str) -> None:
    level, *split = kind.split()
    model = nn.Sequential(nn.Linear(70, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.register_buffer("table", torch.linspace(0, 1, 300))
    model[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keywords = {"master_weights": "split"} if split else {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mpinit.initialize(model, optimizer, level, **keywords)
        saved = model.state_dict()
        mpinit.undo(model)
    for name, value in model.state_dict().items():
        if name == "table" or (level != "O3" and name != "0.weight"):
            assert torch.equal(value, before[name]) and torch.equal(saved[name], before[name]), name


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1, 0.9), torch.optim.Adam], ids=["SGD", "Adam"])
def test_state_stepped_in_place_is_not_undone(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """State of weights without masters stays what its 16-bit numbers have become."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    optimizer = make(model.parameters())
    x = torch.randn(4, 3)
    sum(layer(x).sum() for layer in model).backward()
    optimizer.step()
    states = optimizer.state.items()
    before = {p: {key: value.clone() for key, value in state.items() if value.dim()} for p, state in states}
    mpinit.initialize(model, optimizer, "O3")
    optimizer.zero_grad()
    model[0](x).square().sum().backward()
    optimizer.step()
    stepped = {p: {key: optimizer.state[p][key].clone() for key in entries} for p, entries in before.items()}
    mpinit.undo(model)
    for parameter in model[0].parameters():
        for key, value in stepped[parameter].items():
            assert value.dtype is torch.float16
            assert not torch.equal(value.float(), before[parameter][key])
            torch.testing.assert_close(optimizer.state[parameter][key], value.float(), rtol=2e-3, atol=1e-7)
    for parameter in model[1].parameters():
        for key, value in before[parameter].items():
            assert torch.equal(optimizer.state[parameter][key], value.half().float())


CLASSES = (
    *(nn.Module, nn.Parameter, torch.Tensor, torch.optim.Optimizer, torch.optim.AdamW, nn.Linear, nn.LayerNorm),
    *(nn.parallel.DistributedDataParallel, torch.optim.swa_utils.AveragedModel, torch.amp.GradScaler),
)


def picture() -> dict[str, int]:
    """The ids of what torch's modules and these classes hold, but for what torch itself sets."""
    owners: dict[str, Any] = {name: module for name, module in sys.modules.items() if name.startswith("torch.")}
    owners |= {f"{cls.__module__}.{cls.__qualname__}": cls for cls in CLASSES}
    return {
        f"{owner}.{name}": id(value)
        for owner, holder in owners.items()
        for name, value in list(vars(holder).items())
        if issubclass(type(value), (types.FunctionType, type, property))
    }


@pytest.mark.parametrize("kind", ["O0", "O2", "O3", "split", "model", "int8"])
def test_undo_restores_torch(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.TransformerEncoderLayer(8, 2), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, 4)).sum().backward()
    optimizer.step()
    before = picture()
    mpinit.initialize(model, optimizer, keep_fp32=["1"] if kind != "O0" else None, **LEVELS[kind])
    with mpinit.scale_loss(model(torch.ones(1, 3, 4)).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    during = picture()
    # Losses that torch has in Python are wrapped while a model has 16-bit weights.
    losses = ("gaussian_nll", "l1", "mse", "multilabel_soft_margin", "triplet_margin_with_distance")
    wrapped = {f"torch.nn.functional.{loss}_loss" for loss in losses if kind != "O0"}
    assert {name for name in before if during.get(name) != before[name]} == wrapped
    assert ("data" in vars(nn.Parameter)) == (kind in ("O2", "int8", "split", "model"))
    mpinit.undo(model)
    after = picture()
    assert not {name for name in before if after.get(name) != before[name]}
    assert "data" not in vars(nn.Parameter)


def test_next_undo_removes_step_hooks_of_dropped_session() -> None:
    before = len(_global_optimizer_pre_hooks)
    model = nn.Linear(2, 2)
    kept = mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5")
    assert len(_global_optimizer_pre_hooks) >= 1
    del model, kept
    gc.collect()
    another = mpinit.initialize(nn.Linear(2, 2), opt_level="O1")
    mpinit.undo(another)
    assert len(_global_optimizer_pre_hooks) <= before
