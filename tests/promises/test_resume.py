"""Checkpoints resumed in a fresh process: no bit changes."""

import copy
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import HALVES, adam, batches, keywords, load, mlp, momentum, save, train
from states_by_name import assert_same
from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer

import mpinit

OPTIMIZERS: dict[str, Any] = {
    "sgd": momentum,
    "adam": adam,
    "adamw fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adafactor": lambda p: Adafactor(p, lr=0.01),
}
ORDERS = ("load, initialize", "initialize, load", "initialize, train, load")
LEVELS = [("O0", torch.float32), *itertools.product(("O1", "O2", "O3"), HALVES), ("split", torch.bfloat16)]
# Every level and every optimizer in every order.
CASES = [
    (level, dtype, name, ORDERS[(index + number) % 3])
    for index, (level, dtype) in enumerate(LEVELS)
    for number, name in enumerate(OPTIMIZERS)
    # Adam in float16 without masters divides by an epsilon of 0: no run to compare with.
    if not (level == "O3" and dtype == torch.float16 and name != "sgd")
]
HALF = 10


def net(seed: int = 0) -> nn.Sequential:
    return mlp(seed=seed, dropout=0.3, batchnorm=True)


def settings(level: str, dtype: torch.dtype) -> dict[str, Any]:
    if level == "split":
        return keywords("O2", dtype) | {"master_weights": "split"}
    # torch has no float16 BatchNorm with float16 parameters on a CPU.
    scale = {"loss_scale": mpinit.DynamicLossScale(growth_interval=4)} if level in ("O1", "O2") else {}
    return keywords(level, dtype) | scale | ({"keep_batchnorm_fp32": True} if level == "O3" else {})


def resume(checkpoint: dict[str, Any], model: nn.Module, name: str, order: str, **given: Any) -> Optimizer:
    """Initialise a model with an optimizer and load both, and the scalers, in the order given."""
    optimizer: Optimizer = OPTIMIZERS[name](model.parameters())
    if order == "load, initialize":
        load(checkpoint, model, optimizer)
    mpinit.initialize(model, optimizer, **given)
    if order == "initialize, train, load":
        train(model, optimizer, batches(2, seed=8))
        optimizer.zero_grad()
    if order != "load, initialize":
        load(checkpoint, model, optimizer)
    mpinit.load_state_dict(checkpoint["mpinit"], optimizer)
    return optimizer


def run_through(level: str, dtype: torch.dtype, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train 20; return what was saved after 10, and after 20."""
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


def _in_a_fresh_process(folder: Path) -> None:
    for path in sorted(folder.glob("*.pt")):
        checkpoint = torch.load(path, weights_only=True)["checkpoint"]
        level, dtype, name, order = CASES[int(path.stem)]
        model = net(seed=9)
        optimizer = resume(checkpoint, model, name, order, **settings(level, dtype))
        torch.set_rng_state(checkpoint["rng"])
        train(model, optimizer, batches(2 * HALF)[HALF:])
        torch.save(save(model, optimizer), path.with_suffix(".resumed"))
        mpinit.undo(model)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Any, Any]]:
    """For every case: what an unbroken run saved at its end, and one that was resumed in a fresh process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    unbroken: dict[int, Any] = {}
    for number, case in enumerate(CASES):
        halfway, unbroken[number] = run_through(*case[:3])
        torch.save({"checkpoint": halfway}, folder / f"{number}.pt")
    command = [sys.executable, "-W", "error", __file__, str(folder)]
    subprocess.run(command, check=True, timeout=300)
    return {
        number: (torch.load(folder / f"{number}.resumed", weights_only=True), end) for number, end in unbroken.items()
    }


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(map(str, case)) for case in CASES])
def test_resuming_in_a_fresh_process_changes_no_bit(results: dict[int, tuple[Any, Any]], number: int) -> None:
    resumed, unbroken = results[number]
    assert_same(resumed, unbroken, dtype=None)
    assert all(bool(value.isfinite().all()) for value in unbroken["model"].values())
    assert unbroken["model"]["0.weight"].dtype == torch.float32


if __name__ == "__main__":
    torch.set_num_threads(1)
    _in_a_fresh_process(Path(sys.argv[1]))
