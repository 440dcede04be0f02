"""Every level and store resumes to the bit, through torch.save, safetensors, torch's checkpoints and TrainState."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from loops import iterate
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

import mpinit

INT8, SPLIT = {"optimizer_state": "int8"}, {"master_weights": "split"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{level: (level, {}) for level in ("O0", "O1", "O2", "O3", "O4", "O5")},
    "split": ("O5", SPLIT),
    "model": ("O5", {"master_weights": "model"}),
    "O2 model": ("O2", {"master_weights": "model"}),
    "int8": ("O5", INT8),
    "split int8": ("O5", SPLIT | INT8),
    "split bfloat16": ("O5", SPLIT | {"optimizer_state": "bfloat16"}),
}
MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}
Run = tuple[nn.Sequential, Optimizer]


def start(kind: str, make: str, seed: int) -> Run:
    torch.manual_seed(seed)
    # One weight is large enough for encoded states.
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8))
    optimizer = MAKE[make](model.parameters())
    level, given = KINDS[kind]
    mpinit.initialize(model, optimizer, level, **given)
    return model, optimizer


def train(run: Run, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        iterate((run[0](x).float() - x[:, :8]).square().mean(), run[1])


def by_torch(run: Run, path: Path) -> Callable[[Run], None]:
    parts = run[0].state_dict(), run[1].state_dict(), mpinit.state_dict(run[1])
    torch.save(parts, path / "checkpoint.pt")

    def load(other: Run) -> None:
        model, optimizer, scalers = torch.load(path / "checkpoint.pt")
        other[0].load_state_dict(model)
        other[1].load_state_dict(optimizer)
        mpinit.load_state_dict(scalers, other[1])

    return load


def by_safetensors(run: Run, path: Path) -> Callable[[Run], None]:
    state = run[1].state_dict()
    tensors = {f"{i}/{key}": value for i, each in state["state"].items() for key, value in each.items()}
    save_file(run[0].state_dict(), path / "model.safetensors")
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "optimizer.safetensors")
    scalers = mpinit.state_dict(run[1])

    def load(other: Run) -> None:
        other[0].load_state_dict(load_file(path / "model.safetensors"))
        states: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in load_file(path / "optimizer.safetensors").items():
            index, key = name.split("/")
            states.setdefault(int(index), {})[key] = value
        other[1].load_state_dict({"state": states, "param_groups": state["param_groups"]})
        mpinit.load_state_dict(scalers, other[1])

    return load


def by_dcp(run: Run, path: Path) -> Callable[[Run], None]:
    model, optimizer = get_state_dict(*run)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path / "dcp")
    scalers = mpinit.state_dict(run[1])

    def load(other: Run) -> None:
        model, optimizer = get_state_dict(*other)
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=path / "dcp")
        set_state_dict(*other, model_state_dict=model, optim_state_dict=optimizer)
        mpinit.load_state_dict(scalers, other[1])

    return load


def by_train_state(run: Run, path: Path) -> Callable[[Run], None]:
    dcp.save({"train": mpinit.TrainState(*run)}, checkpoint_id=path / "train")
    return lambda other: dcp.load({"train": mpinit.TrainState(*other)}, checkpoint_id=path / "train")


WAYS = {"torch.save": by_torch, "safetensors": by_safetensors, "DCP": by_dcp, "TrainState": by_train_state}


@pytest.mark.filterwarnings("ignore:.*torch.distributed.*unavailable", "ignore:TypedStorage", "ignore:Please use")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_to_the_bit(kind: str, make: str, way: str, tmp_path: Path) -> None:
    run = start(kind, make, seed=0)
    train(run, range(3))
    load = WAYS[way](run, tmp_path)
    train(run, range(3, 6))
    expected = {name: value.clone() for name, value in run[0].state_dict().items()}
    mpinit.undo(run[0])
    other = start(kind, make, seed=1)
    train(other, range(10, 11))
    load(other)
    train(other, range(3, 6))
    found = other[0].state_dict()
    assert all(value.dtype is torch.float32 for value in found.values())
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
