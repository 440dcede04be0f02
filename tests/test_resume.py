"""Checkpoints: resumed bit for bit in a fresh process, at another level or dtype, and from other people's files."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import (
    HALVES,
    backward,
    batches,
    follow,
    keywords,
    masters,
    mlp,
    momentum,
    mse,
    same,
    start,
    train,
    train_plainly,
)
from torch import nn
from torch.optim import Adafactor, Adam, AdamW, Optimizer

import mpinit

OPTIMIZERS: dict[str, Any] = {
    "sgd": momentum,
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adafactor": lambda p: Adafactor(p, lr=0.01),
}
ORDERS = ("load, initialize", "initialize, load", "initialize, train, load")
LEVELS = [("O0", torch.float32), *itertools.product(("O1", "O2", "O3"), HALVES)]
CASES = [
    (level, dtype, name, order)
    for (level, dtype), name in itertools.product(LEVELS, OPTIMIZERS)
    for order in ORDERS
    # Adam in float16 without masters divides by an epsilon of 0: no run to compare with.
    if not (level == "O3" and dtype == torch.float16 and name != "sgd")
]
HALF = 10


def net() -> nn.Sequential:
    return mlp(dropout=0.3, batchnorm=True)


def settings(level: str, dtype: torch.dtype) -> dict[str, Any]:
    # torch has no float16 BatchNorm with float16 parameters on a CPU.
    return keywords(level, dtype) | {"growth_interval": 4} | ({"keep_batchnorm_fp32": True} if level == "O3" else {})


def save(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "mpinit": mpinit.state_dict(optimizer),
        "rng": torch.get_rng_state(),
    }


def load(checkpoint: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


def resume(checkpoint: dict[str, Any], case: tuple[str, torch.dtype, str, str]) -> tuple[nn.Module, Optimizer]:
    """Set up anew, load in the case's order, train the second half."""
    level, dtype, name, order = case
    model = mlp(seed=9, dropout=0.3, batchnorm=True)
    optimizer = OPTIMIZERS[name](model.parameters())
    if order == "load, initialize":
        load(checkpoint, model, optimizer)
    mpinit.initialize(model, optimizer, **settings(level, dtype))
    if order == "initialize, train, load":
        train(model, optimizer, batches(2, seed=8))
        optimizer.zero_grad()
    if order != "load, initialize":
        load(checkpoint, model, optimizer)
    mpinit.load_state_dict(checkpoint["mpinit"], optimizer)
    torch.set_rng_state(checkpoint["rng"])
    train(model, optimizer, batches(2 * HALF)[HALF:])
    return model, optimizer


def run_through(case: tuple[str, torch.dtype, str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train 20; return what was saved after 10, and after 20."""
    level, dtype, name, _ = case
    model = net()
    optimizer: Optimizer = OPTIMIZERS[name](model.parameters())
    mpinit.initialize(model, optimizer, **settings(level, dtype))
    torch.manual_seed(5)
    data = batches(2 * HALF)
    train(model, optimizer, data[:HALF])
    halfway = copy.deepcopy(save(model, optimizer))
    train(model, optimizer, data[HALF:])
    end = copy.deepcopy(save(model, optimizer))
    # O1's casts are on for everything in the thread: the next case shall not see them.
    mpinit.undo(model)
    return halfway, end


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where two checkpoints are not the same, bit for bit and dtype for dtype."""
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return [f"{where}: {list(ours)} and {list(theirs)}"]
        return [d for key in ours for d in differences(ours[key], theirs[key], f"{where}.{key}")]
    if isinstance(ours, list):
        return [d for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for d in differences(a, b, f"{where}.{i}")]
    if isinstance(ours, torch.Tensor):
        if ours.dtype != theirs.dtype:
            return [f"{where}: {ours.dtype} and {theirs.dtype}"]
        return [] if torch.equal(ours, theirs) and bool(ours.float().isfinite().all()) else [f"{where}: values"]
    return [] if ours == theirs else [f"{where}: {ours} and {theirs}"]


def _in_a_fresh_process(folder: Path) -> None:
    for path in sorted(folder.glob("*.pt")):
        halfway = torch.load(path, weights_only=True)
        model, optimizer = resume(halfway["checkpoint"], CASES[int(path.stem)])
        torch.save(save(model, optimizer), path.with_suffix(".resumed"))
        mpinit.undo(model)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Any, Any]]:
    """For every case: what an unbroken run saved at its end, and one that was resumed in a fresh process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    unbroken: dict[int, Any] = {}
    for number, case in enumerate(CASES):
        halfway, unbroken[number] = run_through(case)
        torch.save({"checkpoint": halfway}, folder / f"{number}.pt")
    command = [sys.executable, "-W", "error", __file__, str(folder)]
    subprocess.run(command, check=True, timeout=300)
    return {
        number: (torch.load(folder / f"{number}.resumed", weights_only=True), end) for number, end in unbroken.items()
    }


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(map(str, case)) for case in CASES])
def test_resuming_in_a_fresh_process_changes_no_bit(results: dict[int, tuple[Any, Any]], number: int) -> None:
    resumed, unbroken = results[number]
    assert differences(resumed, unbroken) == []
    assert unbroken["model"]["0.weight"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["sgd", "adamw fused"])
def test_split_masters_resume_bit_for_bit(dtype: torch.dtype, order: str, name: str) -> None:
    given = keywords("O2", dtype) | {"master_weights": "split"}

    def fresh(seed: int) -> tuple[nn.Module, Optimizer]:
        model = mlp(seed=seed)
        return model, OPTIMIZERS[name](model.parameters())

    model, optimizer = fresh(0)
    mpinit.initialize(model, optimizer, **given)
    train(model, optimizer, batches(4))
    halfway = copy.deepcopy(save(model, optimizer))
    train(model, optimizer, batches(4, seed=3))
    again, resumed = fresh(9)
    if order == "load, initialize":
        load(halfway, again, resumed)
    mpinit.initialize(again, resumed, **given)
    if order == "initialize, train, load":
        train(again, resumed, batches(2, seed=8))
        resumed.zero_grad()
    if order != "load, initialize":
        load(halfway, again, resumed)
    mpinit.load_state_dict(halfway["mpinit"], resumed)
    train(again, resumed, batches(4, seed=3))
    same(again.state_dict().values(), model.state_dict().values())
    same(_states(resumed), _states(optimizer))


def _states(optimizer: Optimizer) -> list[torch.Tensor]:
    return [v for s in optimizer.state_dict()["state"].values() for v in s.values() if isinstance(v, torch.Tensor)]


# -- another level, another dtype -----------------------------------------------------------------------------------


@pytest.mark.parametrize("load_first", [False, True])
def test_a_checkpoint_goes_from_level_to_level_without_losing_a_bit(load_first: bool) -> None:
    model = mlp()
    optimizer = start(model, "O2", make=OPTIMIZERS["adam"])
    train(model, optimizer, batches(3))
    reference = mlp()
    plain = OPTIMIZERS["adam"](reference.parameters())
    load(copy.deepcopy(save(model, optimizer)), reference, plain)
    for level, dtype in (("O1", torch.float16), ("O2", torch.bfloat16), ("O0", torch.float16), ("O2", torch.float16)):
        checkpoint = copy.deepcopy(save(model, optimizer))
        model = mlp(seed=4)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        if load_first:
            load(checkpoint, model, optimizer)
        mpinit.initialize(model, optimizer, **keywords(level, dtype))
        if not load_first:
            load(checkpoint, model, optimizer)
        same(masters(optimizer), reference.parameters())
        same(_states(optimizer), _states(plain))
        same(model.state_dict().values(), checkpoint["model"].values())
    train(model, optimizer, batches(1))
    follow(model, optimizer)


def test_o3_keeps_what_16_bit_can_hold() -> None:
    model = mlp()
    optimizer = start(model, "O2")
    train(model, optimizer, batches(3))
    checkpoint = copy.deepcopy(model.state_dict())
    target = mlp(seed=4)
    start(target, "O3")
    target.load_state_dict(checkpoint)
    same(target.parameters(), [value.half() for value in checkpoint.values()])


# -- other people's checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_plain_torch_checkpoint_goes_on_from_where_it_was(level: str) -> None:
    reference, data = mlp(), batches(6)
    plain = momentum(reference.parameters())
    train_plainly(reference, plain, data[:3])
    checkpoint = copy.deepcopy({"model": reference.state_dict(), "optimizer": plain.state_dict()})
    model = mlp(seed=4)
    optimizer = start(model, level)
    load(checkpoint, model, optimizer)
    same(masters(optimizer), checkpoint["model"].values())
    train(model, optimizer, data[3:])
    train_plainly(reference, plain, data[3:])
    for got, expected in zip(masters(optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    "state",
    [
        {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 7}},
        torch.amp.GradScaler("cpu", init_scale=128.0).state_dict() | {"_growth_tracker": 7},
    ],
    ids=["loss_scaler0", "GradScaler"],
)
def test_other_scalers_states_are_taken_over(state: dict[str, Any]) -> None:
    optimizer = start(mlp())
    mpinit.load_state_dict(state, optimizer)
    assert mpinit.loss_scale(optimizer) == 128.0
    assert mpinit.state_dict(optimizer) == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 7}}


def test_a_checkpoint_of_16_bit_weights_rebuilds_the_masters_with_one_warning() -> None:
    source = mlp(seed=4).half()
    checkpoint = source.state_dict()
    model = nn.Sequential(mlp(), nn.Linear(3, 3))
    optimizer = start(model)
    with pytest.warns(UserWarning, match=r"4 weights.*0\.weight, .*masters were rebuilt") as caught:
        model[0].load_state_dict(checkpoint)
    assert len(caught) == 1 and caught[0].filename == __file__
    same(masters(optimizer)[:4], [value.float() for value in checkpoint.values()])
    same([p.detach() for p in model[0].parameters()], checkpoint.values())
    with pytest.warns(UserWarning, match=r"0\.0\.weight, 0\.0\.bias, 0\.3\.weight first") as caught:
        model.load_state_dict({name: value.half() for name, value in model.state_dict().items()})
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(model.state_dict())


def test_16_bit_values_for_weights_without_masters_need_no_warning() -> None:
    for level in ("O0", "O1", "O3"):
        model = mlp()
        start(model, level)
        model.load_state_dict(mlp(seed=4).half().state_dict())
        same(model.state_dict().values(), [value.half().float() for value in mlp(seed=4).state_dict().values()])


# -- partial and wrong states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, "split"])
def test_strict_false_is_honoured(mode: Any) -> None:
    model, other = mlp(), mlp(seed=4)
    start(model, "O2", torch.bfloat16, master_weights=mode)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state: dict[str, Any] = {"0.weight": other[0].weight.detach(), "stranger": torch.ones(1)}
    result = model.load_state_dict(state, strict=False)
    assert result.unexpected_keys == ["stranger"] and "0.bias" in result.missing_keys
    same(model.state_dict().values(), [state["0.weight"], *list(before.values())[1:]])
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*Unexpected key"):
        model.load_state_dict(state)


def test_a_shape_that_does_not_fit_leaves_weight_and_master_as_they_were() -> None:
    model = mlp()
    optimizer = start(model)
    before = masters(optimizer)
    with pytest.raises(RuntimeError, match=r"size mismatch for 3\.weight"):
        model.load_state_dict({"3.weight": torch.ones(5, 5)}, strict=False)
    same(masters(optimizer), before)
    follow(model, optimizer)


SCALER = {"loss_scale": 8.0, "unskipped": 1}


@pytest.mark.parametrize(
    ("state", "parts"),
    [
        ({}, ["loss_scaler0 is missing", "loss_scaler1 is missing", "num_losses=2"]),
        ({"loss_scaler0": SCALER}, ["loss_scaler1 is missing"]),
        ({"loss_scaler0": SCALER, "loss_scaler1": SCALER, "loss_scaler2": SCALER}, ["'loss_scaler2' is not known"]),
        ({"loss_scaler0": SCALER, "loss_scaler1": {"loss_scale": 8.0}}, ["loss_scaler1 has no 'unskipped'"]),
        ({"loss_scaler0": {"loss_scale": float("inf"), "unskipped": 0}, "loss_scaler1": SCALER}, ["loss_scale=inf"]),
        ({"loss_scaler0": SCALER, "loss_scaler1": {"loss_scale": 8.0, "unskipped": -1}}, ["unskipped=-1"]),
        ({"loss_scaler0": SCALER, "loss_scaler1": 8.0}, ["loss_scaler1 is 8.0, not a mapping"]),
        (torch.amp.GradScaler("cpu").state_dict(), ["loss_scaler1 is missing"]),
    ],
)
def test_a_state_that_does_not_fit_lists_the_differences_and_changes_nothing(
    state: dict[str, Any], parts: list[str]
) -> None:
    model = mlp()
    optimizer = momentum(model.parameters())
    mpinit.initialize(model, optimizer, num_losses=2, **keywords("O2"))
    before = mpinit.state_dict(optimizer)
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        mpinit.load_state_dict(state, optimizer)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert mpinit.state_dict(optimizer) == before


def test_loading_between_backward_and_step_drops_nothing_but_the_weights() -> None:
    model, batch = mlp(), batches(1)[0]
    optimizer = start(model, make=lambda p: torch.optim.SGD(p, lr=1.0))
    backward(mse(model, batch), optimizer)
    moved = [p.grad.clone() for p in mpinit.master_params(optimizer) if p.grad is not None]
    target = mlp(seed=4)
    model.load_state_dict(target.state_dict())
    optimizer.step()
    same(masters(optimizer), [p.detach() - g for p, g in zip(target.parameters(), moved, strict=True)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    _in_a_fresh_process(Path(sys.argv[1]))
