"""Checks for two processes of torch.distributed.checkpoint's states by name; entered by distributed_worker."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import CASES as MODELS
from models import train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mpinit

CASE = MODELS["transformer"]
LEVELS: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2", "init_loss_scale": 1024.0},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
}
DDP_CASES = [("O2", "plain"), ("O2", "broadcast"), ("O5", "files"), ("split", "full"), ("split", "broadcast")]
FSDP_CASES = [("O2", "full"), ("O5", "files"), ("O2", "broadcast"), ("O5", "broadcast")]
Pair = tuple[nn.Module, torch.optim.Optimizer]


def ddp_states_by_name(level: str, way: str) -> None:
    """A run resumed under DistributedDataParallel."""

    def build() -> Pair:
        model = CASE.build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[level])
        return DistributedDataParallel(model), optimizer

    resume(build, way)


def fsdp_states_by_name(level: str, way: str) -> None:
    """A run resumed with a model that fully_shard has sharded."""

    def build() -> Pair:
        mesh = init_device_mesh("cpu", (2,))
        model = CASE.build()
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[level])
        return model, optimizer

    resume(build, way)


def resume(build: Callable[[], Pair], way: str) -> None:
    """Train, save, train on; then load what was saved into another pair, train on, and compare bit for bit."""
    batches = [tuple(part.chunk(2)[dist.get_rank()] for part in batch) for batch in CASE.batches(4)]
    model, optimizer = build()
    train(model, optimizer, batches[:2], CASE.loss)
    everything = whole(*get_state_dict(model, optimizer))
    state, scalers = saved(model, optimizer, way), mpinit.state_dict(optimizer)
    train(model, optimizer, batches[2:], CASE.loss)
    end = whole(*get_state_dict(model, optimizer))
    mpinit.undo(optimizer)
    again, resumed = build()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.add_(0.5)
    load(again, resumed, state, way)
    mpinit.load_state_dict(scalers, resumed)
    assert_same(whole(*get_state_dict(again, resumed)), everything)
    train(again, resumed, batches[2:], CASE.loss)
    assert_same(whole(*get_state_dict(again, resumed)), end)


def saved(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> Any:
    """The states, or the folder they are in."""
    if way == "files":
        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders, src=0)
        ours, theirs = get_state_dict(model, optimizer)
        dcp.save({"model": ours, "optimizer": theirs}, checkpoint_id=folders[0])
        return folders[0]
    options = StateDictOptions(full_state_dict=way != "plain", cpu_offload=way == "broadcast")
    states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    if way == "broadcast" and dist.get_rank() == 1:
        assert states == ({}, {}), states
    return states


def load(model: nn.Module, optimizer: torch.optim.Optimizer, state: Any, way: str) -> None:
    """Into another pair."""
    options = StateDictOptions(full_state_dict=way in ("full", "broadcast"), broadcast_from_rank0=way == "broadcast")
    if way == "files":
        ours, theirs = get_state_dict(model, optimizer)
        dcp.load({"model": ours, "optimizer": theirs}, checkpoint_id=state)
    else:
        ours, theirs = state
    # Not set_state_dict, which leaves a rank without a state of the model out of its broadcast.
    set_model_state_dict(model, ours, options=options)
    set_optimizer_state_dict(model, optimizer, theirs, options=options)


def whole(model: dict[str, Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Every tensor of both states, by name, unsharded."""
    found = {f"model.{name}": value for name, value in model.items()}
    for name, entries in optimizer["state"].items():
        found |= {f"optimizer.{name}.{key}": value for key, value in entries.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in found.items()
    }


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """To the bit, in float32."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    assert {value.dtype for value in ours.values()} == {torch.float32}
    different = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    assert not different, different
