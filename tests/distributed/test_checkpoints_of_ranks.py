"""Checkpoints of several processes: torch.distributed.checkpoint's states by name, and mpinit.TrainState."""

import copy
import functools
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engines import CASE, assert_close, assert_same, mesh, mine, refused, sharded, whole
from models import LEVELS, train
from processes import ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mpinit

Pair = tuple[nn.Module, torch.optim.Optimizer]


def folder_of_all() -> str:
    """A new folder, the same for all, who wait for rank 0, which takes part in everything, to be here."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders, src=0)
    return folders[0]


def everything(model: dict[str, Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Every tensor of both states, in float32."""
    found = whole({"model": model, "optimizer": optimizer["state"]})
    assert {value.dtype for value in found.values()} == {torch.float32}
    return found


def of(state: mpinit.TrainState) -> dict[str, torch.Tensor]:
    """Every tensor of weights and optimizer."""
    found = state.state_dict()
    return everything(found["model"], found["optim"])


def build(engine: str, level: str) -> Pair:
    model = sharded() if engine == "fsdp" else CASE.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    return DistributedDataParallel(model) if engine == "ddp" else model, optimizer


@ranks(2, ("ddp", "split"), ("fsdp", "O2"), long=[("ddp", "O2"), ("fsdp", "O5")])
def test_a_run_resumed_from_states_by_name(engine: str, level: str) -> None:
    """Train, save, train on; then load what was saved into another pair, train on, and compare bit for bit."""
    batches = [mine(batch) for batch in CASE.batches(4)]
    model, optimizer = build(engine, level)
    train(model, optimizer, batches[:2], CASE.loss)
    saved, scalers = copy.deepcopy(get_state_dict(model, optimizer)), mpinit.state_dict(optimizer)
    train(model, optimizer, batches[2:], CASE.loss)
    end = everything(*get_state_dict(model, optimizer))
    mpinit.undo(optimizer)
    again, resumed = build(engine, level)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.add_(0.5)
    set_model_state_dict(again, saved[0])
    set_optimizer_state_dict(again, resumed, saved[1])
    mpinit.load_state_dict(scalers, resumed)
    train(again, resumed, batches[2:], CASE.loss)
    assert_same(everything(*get_state_dict(again, resumed)), end)


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
        model = sharded(self.mesh) if self.engine == "fsdp" else CASE.build()
        if self.engine == "tp":
            plan = {"layer.linear1": ColwiseParallel(), "layer.linear2": RowwiseParallel()}
            parallelize_module(model, self.mesh, plan)
        optimizer = self.make(model.parameters(), lr=0.01)
        group = {"process_group": self.group} if self.level in ("O1", "O2", "model") else {}
        mpinit.initialize(model, optimizer, **LEVELS[self.level], **group)
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


@ranks(
    4,
    ("ddp2 split", "fsdp4 O1", "one1 O0"),
    ("fsdp2 split", "fsdp4 split", "one1 split"),
    long=[("fsdp4 O2", "tp2 O5", "one1 split", "ddp2 model"), ("tp2 O5", "fsdp2 O2")],
)
def test_a_state_goes_through_other_runs_and_back(*chain: str) -> None:
    """Whatever engine, level and number of processes: the bits stay, and training goes on with them."""
    first = Run(chain[0])
    expected = end = None
    folder = folder_of_all()
    if first.takes_part:
        pair, state = first.build()
        first.train(pair, 0, 2)
        first.save(state, folder)
        expected = of(state)
        first.train(pair, 2, 4)
        end = of(state)
        mpinit.undo(pair[1])
    for words in (*chain[1:], chain[0]):
        run, before, folder = Run(words), folder, folder_of_all()
        if run.takes_part:
            pair, state = run.build()
            run.load(state, before)
            found = of(state)
            if expected is not None:
                assert_same(found, expected)
            run.save(state, folder)
            if words == chain[0]:
                run.train(pair, 2, 4)
                found = of(state)
                assert end is not None
                assert_same(found, end)
            mpinit.undo(pair[1])


@ranks(4, ("fsdp4 O2",), long=[("ddp4 split",)])
def test_what_is_saved_in_background_is_state_of_that_moment(words: str) -> None:
    """Save by ``async_save`` while training continues."""
    run, folder = Run(words), folder_of_all()
    pair, state = run.build()
    run.train(pair, 0, 2)
    expected = of(state)
    writing = dcp.async_save({"app": state}, checkpoint_id=folder, process_group=aside(dist.group.WORLD))
    run.train(pair, 2, 4)
    writing.result()
    mpinit.undo(pair[1])
    pair, state = run.build()
    run.load(state, folder)
    assert_same(of(state), expected)


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)


@ranks(4, ("fsdp4 O5", "sgd"), ("fsdp4 split", "adam"), long=[("ddp4 split", "adam"), ("tp4 O2", "adam")])
def test_full_state_is_on_rank_0(words: str, name: str) -> None:
    """Gathered once; loaded from rank 0; refused on all ranks where it does not fit."""
    run = Run(words, {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name])
    pair, state = run.build(options=WHOLE)
    here = mpinit.TrainState(*pair)
    run.train(pair, 0, 2)
    expected = of(here)
    tensors = [value for value in _tensors(here.state_dict()) if isinstance(value, DTensor)]
    sharded = [value for value in tensors if any(placement.is_shard() for placement in value.placements)]
    with CommDebugMode() as counted:
        state.state_dict()
    gathers = counted.get_total_counts()
    saved = copy.deepcopy(state.state_dict())
    if dist.get_rank() == 0:
        assert_same(everything(saved["model"], saved["optim"]), expected)
    else:
        assert saved == {}
    assert gathers == len(sharded), (gathers, len(sharded))
    run.train(pair, 2, 3)
    before = of(here)
    wrong = {part: copy.copy(entries) for part, entries in saved.items() if part != "scalers"}
    if wrong:
        del wrong["model"]["head.bias"]
    with refused(ValueError, "nothing was loaded: the model's state lacks 'head.bias'"):
        state.load_state_dict(wrong)
    assert_same(of(here), before)
    state.load_state_dict(saved)
    assert_same(of(here), expected)
    run.train(pair, 2, 3)
    assert_same(of(here), before)


@ranks(2)
def test_16_bit_shards_train_after_a_load_in_float32() -> None:
    """Load weights inside ``float32_weights``, which FSDP2 reads again afterwards, as with three plain dicts."""
    batch = mine(CASE.batches(1)[0])
    ends = []
    for loads in (False, True):
        pair = build("fsdp", "split")
        train(*pair, [batch], CASE.loss)
        if loads:
            with mpinit.float32_weights(pair[0]):
                pair[0].load_state_dict(copy.deepcopy(pair[0].state_dict()))
        train(*pair, [batch], CASE.loss)
        ends.append(everything(*get_state_dict(*pair)))
        mpinit.undo(pair[1])
    assert_same(*ends)


@ranks(4, ("fsdp4 split",), ("tp4 O2",))
def test_torchs_set_state_dict_warns_about_16_bit_shards(words: str) -> None:
    run = Run(words)
    pair, state = run.build()
    there = {name: value * 1.37 for name, value in of(state).items() if name.startswith("model.")}
    given = {name.removeprefix("model."): value for name, value in there.items()} if dist.get_rank() == 0 else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_model_state_dict(pair[0], given, options=WHOLE)
    assert any("masters were rebuilt from these" in str(warning.message) for warning in caught)
    found = {name: value for name, value in of(state).items() if name in there}
    assert_close(found, there, 1e-2)


def _tensors(state: Any) -> list[torch.Tensor]:
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [state] if isinstance(state, torch.Tensor) else [each for part in parts for each in _tensors(part)]


@ranks(4, ("fsdp4 O2",))
def test_torchs_files_load(words: str) -> None:
    """Load states without scalers, from files and from ``get_state_dict``."""
    run, folder = Run(words), folder_of_all()
    pair, state = run.build()
    run.train(pair, 0, 2)
    scale = mpinit.loss_scale(pair[1])
    ours, theirs = get_state_dict(*pair)
    dcp.save({"app": {"model": ours, "optim": theirs}}, checkpoint_id=folder)
    expected = of(state)
    mpinit.undo(pair[1])
    pair, state = run.build()
    run.load(mpinit.TrainState(*pair, scalers=False), folder)
    assert_same(of(state), expected)
    read = dict(zip(("model", "optim"), copy.deepcopy(get_state_dict(*pair)), strict=True))
    mpinit.undo(pair[1])
    pair, state = run.build()
    state.load_state_dict(read)
    assert_same(of(state), expected)
    assert mpinit.loss_scale(pair[1]) == scale


@ranks(4, ("ddp4 O2",))
def test_files_that_do_not_fit_change_nothing(words: str) -> None:
    """Refuse wrong files before ``dcp.load`` reads into the masters themselves."""
    run, folder = Run(words), folder_of_all()
    pair, state = run.build()
    run.train(pair, 0, 2)
    other = copy.deepcopy(state.state_dict())
    other["model"] = {name: value for name, value in other["model"].items() if name != "head.bias"}
    dcp.save({"app": other}, checkpoint_id=folder)
    run.train(pair, 2, 3)
    before = of(state)
    with refused(BaseException, "app.model.head.bias"):  # torch's own error is no Exception
        run.load(state, folder)
    assert_same(of(state), before)
    other = copy.deepcopy(state.state_dict())
    other["scalers"] = other["scalers"].repeat(2, 1)
    dcp.save({"app": other}, checkpoint_id=folder)
    run.train(pair, 3, 4)
    before = of(state)
    with refused(BaseException, "app.scalers"):
        run.load(state, folder)
    assert_same(of(state), before)


class TwoHeads(nn.Module):
    """A body and two heads, of which a forward uses those that are asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.one = nn.Linear(8, 64, bias=False), nn.Linear(64, 4, bias=False)
        self.other = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor, heads: str) -> torch.Tensor:
        hidden = self.body(x).tanh()
        return torch.cat([getattr(self, name)(hidden).float() for name in heads.split()], dim=1).square().mean()


OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01),
    "muon": functools.partial(torch.optim.Muon, lr=0.01),
}


@ranks(
    2,
    ("fsdp", "O2", "adamw"),
    ("ddp", "O5", "momentum"),
    long=[
        *(("fsdp", level, "adamw") for level in ("O0", "O1", "O5", "split", "int8")),
        *(("ddp", level, "adamw") for level in ("O0", "O1", "O2", "split", "model", "int8")),
        *((engine, "O2", name) for engine in ("fsdp", "ddp") for name in ("momentum", "rmsprop", "muon")),
    ],
)
def test_layer_that_was_not_used_before_a_save(engine: str, level: str, name: str) -> None:
    """Save, train on and load: both runs have the bits of one that was not saved."""

    def made(seed: int) -> Pair:
        model: Any = TwoHeads(seed)
        if engine == "fsdp":
            for part in (model.other, model):
                fully_shard(part, mesh=mesh(2))
        optimizer = OPTIMIZERS[name](model.parameters())
        mpinit.initialize(model, optimizer, **LEVELS[level])
        return DistributedDataParallel(model, find_unused_parameters=True) if engine == "ddp" else model, optimizer

    def run(pair: Pair, heads: str, seed: int) -> None:
        torch.manual_seed(10 * seed + dist.get_rank())
        for _ in range(2):
            pair[1].zero_grad()
            with mpinit.scale_loss(pair[0](torch.randn(4, 8), heads), pair[1]) as loss:
                loss.backward()
            pair[1].step()

    def values(pair: Pair) -> dict[str, torch.Tensor]:
        return everything(*get_state_dict(*pair))

    pair = made(0)
    run(pair, "one", 1)
    run(pair, "one other", 2)
    end, folder = values(pair), folder_of_all()
    pair = made(0)
    run(pair, "one", 1)
    dcp.save({"app": mpinit.TrainState(*pair)}, checkpoint_id=folder)
    assert len(pair[1].state) == 2
    run(pair, "one other", 2)
    assert_same(values(pair), end)
    pair = made(7)
    dcp.load({"app": mpinit.TrainState(*pair)}, checkpoint_id=folder)
    assert len(pair[1].state) == 2
    run(pair, "one other", 2)
    assert_same(values(pair), end)
