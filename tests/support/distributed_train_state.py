"""Checks for four processes of mpinit.TrainState; entered by distributed_launch.

A part of the processes, the first 1 or 2, or all 4, is one training run; the others wait.
"""

from __future__ import annotations

import copy
import functools
import re
import tempfile
from collections.abc import Callable
from typing import Any

import distributed_by_name
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_by_name import assert_same
from models import CASES as MODELS
from models import train
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mpinit

CASE = MODELS["transformer"]
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1", "init_loss_scale": 1024.0},
    "O2": {"opt_level": "O2", "init_loss_scale": 1024.0},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "model": {"opt_level": "O2", "init_loss_scale": 1024.0, "master_weights": "model"},
}
# Each saves, trains on, and goes through the others, which save and load, back to the first.
CHAINS = (
    ("fsdp4 O2", "tp2 O5", "one1 split", "ddp2 model"),
    ("ddp2 split", "fsdp4 O1", "one1 O0"),
    ("tp2 O5", "fsdp2 O2"),
)
Pair = tuple[nn.Module, torch.optim.Optimizer]


@functools.cache
def meshes(world: Any) -> dict[int, DeviceMesh]:
    """Of the first 1 or 2 processes, and of all 4."""
    return {count: DeviceMesh("cpu", list(range(count))) for count in (1, 2, 4)}


@functools.cache
def aside(world: Any) -> Any:
    """A group of all processes: what is written in the background must not come between what training sends."""
    return dist.new_group()


class Run:
    """A training run on some of the processes: ``"fsdp4 O2"``."""

    def __init__(self, words: str, make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> None:
        engine, self.level = words.split()
        self.engine, self.ranks = engine[:-1], int(engine[-1])
        self.mesh = meshes(dist.group.WORLD)[self.ranks]
        self.takes_part = dist.get_rank() < self.ranks
        self.group = self.mesh.get_group() if self.takes_part else None
        self.make = make

    def build(self, **asked: Any) -> tuple[Pair, mpinit.TrainState]:
        """A pair with weights of its own, and its state."""
        torch.manual_seed(17)
        model = CASE.build()
        if self.engine == "fsdp":
            fully_shard(model.layer, mesh=self.mesh)
            fully_shard(model, mesh=self.mesh)
        elif self.engine == "tp":
            plan = {"layer.linear1": ColwiseParallel(), "layer.linear2": RowwiseParallel()}
            parallelize_module(model, self.mesh, plan)
        optimizer = self.make(model.parameters(), lr=0.01)
        group = {"process_group": self.group} if self.level in ("O1", "O2", "model") else {}
        mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[self.level], **group)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.25)
        wrapped = DistributedDataParallel(model, process_group=self.group) if self.engine == "ddp" else model
        return (wrapped, optimizer), mpinit.TrainState(wrapped, optimizer, **asked)

    def train(self, pair: Pair, first: int, last: int) -> None:
        """On some of the batches; each rank on its part where that is the engine's way."""
        parts = self.ranks if self.engine in ("ddp", "fsdp") else 1
        mine = dist.get_rank() if parts > 1 else 0
        data = [tuple(part.chunk(parts)[mine] for part in batch) for batch in CASE.batches(4)[first:last]]
        train(*pair, data, CASE.loss)

    def save(self, state: mpinit.TrainState, folder: str) -> None:
        dcp.save({"app": state}, checkpoint_id=folder, process_group=self.group)

    def load(self, state: mpinit.TrainState, folder: str) -> None:
        dcp.load({"app": state}, checkpoint_id=folder, process_group=self.group)


def folder_of_all() -> str:
    """A new folder, the same for all, who wait for rank 0, which takes part in everything, to be here."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders, src=0)
    return folders[0]


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of weights and optimizer, by name, unsharded."""
    return distributed_by_name.whole(state["model"], state["optim"])


def assert_refused(run: Callable[[], Any], text: str) -> None:
    """Whatever the error is: torch.distributed.checkpoint's are no Exceptions."""
    try:
        run()
    except BaseException as error:
        assert re.search(text, str(error)), error
    else:
        raise AssertionError(f"nothing was refused; expected {text}")


# -- the checks -----------------------------------------------------------------------------------------------------


def a_state_goes_through_other_runs_and_back(*chain: str) -> None:
    """Whatever engine, level and number of processes: the bits stay, and training goes on with them."""
    first = Run(chain[0])
    expected = end = None
    folder = folder_of_all()
    if first.takes_part:
        pair, state = first.build()
        first.train(pair, 0, 2)
        first.save(state, folder)
        expected = whole(state.state_dict())
        first.train(pair, 2, 4)
        end = whole(state.state_dict())
        mpinit.undo(pair[1])
    for words in (*chain[1:], chain[0]):
        run, before, folder = Run(words), folder, folder_of_all()
        if run.takes_part:
            pair, state = run.build()
            run.load(state, before)
            found = whole(state.state_dict())
            if expected is not None:
                assert_same(found, expected)
            run.save(state, folder)
            if words == chain[0]:
                run.train(pair, 2, 4)
                found = whole(state.state_dict())
                assert end is not None
                assert_same(found, end)
            mpinit.undo(pair[1])


def what_is_saved_in_the_background_is_the_state_of_that_moment(words: str) -> None:
    """async_save, while training goes on."""
    run, folder = Run(words), folder_of_all()
    pair, state = run.build()
    run.train(pair, 0, 2)
    expected = whole(state.state_dict())
    writing = dcp.async_save({"app": state}, checkpoint_id=folder, process_group=aside(dist.group.WORLD))
    run.train(pair, 2, 4)
    writing.result()
    mpinit.undo(pair[1])
    pair, state = run.build()
    run.load(state, folder)
    assert_same(whole(state.state_dict()), expected)


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)


def rank_0_has_all_of_it(words: str, name: str) -> None:
    """Gathered once; loaded from rank 0; refused on all ranks where it does not fit."""
    run = Run(words, {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name])
    pair, state = run.build(options=WHOLE)
    here = mpinit.TrainState(*pair)
    run.train(pair, 0, 2)
    expected = whole(here.state_dict())
    tensors = [value for value in _tensors(here.state_dict()) if isinstance(value, DTensor)]
    sharded = [value for value in tensors if any(placement.is_shard() for placement in value.placements)]
    gathers = _gathers(state.state_dict)
    saved = copy.deepcopy(state.state_dict())
    if dist.get_rank() == 0:
        assert_same(whole(saved), expected)
    else:
        assert saved == {}
    assert gathers == len(sharded), (gathers, len(sharded))
    run.train(pair, 2, 3)
    before = whole(here.state_dict())
    wrong = {part: dict(entries) for part, entries in saved.items() if part != "scalers"}
    if wrong:
        del wrong["model"]["head.bias"]
    assert_refused(lambda: state.load_state_dict(wrong), r"nothing was loaded: the model's state lacks 'head\.bias'")
    assert_same(whole(here.state_dict()), before)
    state.load_state_dict(saved)
    assert_same(whole(here.state_dict()), expected)


def _tensors(state: Any) -> list[torch.Tensor]:
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [state] if isinstance(state, torch.Tensor) else [each for part in parts for each in _tensors(part)]


def _gathers(run: Callable[[], Any]) -> int:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as counted:
        run()
    return counted.get_total_counts()


def what_torch_wrote_is_read(words: str) -> None:
    """Without scalers, from files and as get_state_dict returned it."""
    run, folder = Run(words), folder_of_all()
    pair, state = run.build()
    run.train(pair, 0, 2)
    scale = mpinit.loss_scale(pair[1])
    ours, theirs = get_state_dict(*pair)
    dcp.save({"app": {"model": ours, "optim": theirs}}, checkpoint_id=folder)
    expected = whole(state.state_dict())
    mpinit.undo(pair[1])
    pair, state = run.build()
    run.load(mpinit.TrainState(*pair, scalers=False), folder)
    assert_same(whole(state.state_dict()), expected)
    read = copy.deepcopy(get_state_dict(*pair))
    mpinit.undo(pair[1])
    pair, state = run.build()
    state.load_state_dict(read)
    assert_same(whole(state.state_dict()), expected)
    assert mpinit.loss_scale(pair[1]) == scale


def files_that_do_not_fit_change_nothing(words: str) -> None:
    """dcp.load reads into the masters themselves, so it has to see it before."""
    run, folder = Run(words), folder_of_all()
    pair, state = run.build()
    run.train(pair, 0, 2)
    before = whole(state.state_dict())
    other = copy.deepcopy(state.state_dict())
    other["model"] = {name: value for name, value in other["model"].items() if name != "head.bias"}
    dcp.save({"app": other}, checkpoint_id=folder)
    assert_refused(lambda: run.load(state, folder), r"app\.model\.head\.bias")
    other = copy.deepcopy(state.state_dict())
    other["scalers"] = other["scalers"].repeat(2, 1)
    dcp.save({"app": other}, checkpoint_id=folder)
    run.train(pair, 2, 3)
    before = whole(state.state_dict())
    assert_refused(lambda: run.load(state, folder), r"app\.scalers")
    assert_same(whole(state.state_dict()), before)


CHECKS: dict[str, Callable[[], None]] = {
    " ".join((check.__name__, *words)).replace(" ", "-"): functools.partial(check, *words)
    for check, cases in (
        (a_state_goes_through_other_runs_and_back, CHAINS),
        (what_is_saved_in_the_background_is_the_state_of_that_moment, [("fsdp4 O2",), ("ddp4 split",)]),
        (rank_0_has_all_of_it, [("fsdp4 O5", "sgd"), ("ddp4 split", "adam"), ("tp4 O2", "adam")]),
        (what_torch_wrote_is_read, [("fsdp4 O2",)]),
        (files_that_do_not_fit_change_nothing, [("ddp4 O2",)]),
    )
    for words in cases
}
