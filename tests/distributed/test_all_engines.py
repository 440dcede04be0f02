"""Every engine at every level, against one process."""

import copy
import itertools
import random
import time
import warnings
from dataclasses import replace
from typing import Any

import engines
import torch
import torch.distributed as dist
from engines import text
from models import LEVELS, sums_in_float32
from processes import ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import mpinit

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # they script what torch itself deprecates
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

STEPS = 3
DYNAMIC = {"loss_scale": mpinit.DynamicLossScale(init=1024.0)}
SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}

# Every run has the simplest engines at all levels and what is refused; a long run every engine at one of its levels in
# turn; the nightly one all.
ALWAYS, LONG, NIGHTLY = [], [], []
for index, (name, engine) in enumerate(engines.ENGINES.items()):
    works = [level for level in engine.levels if level not in engine.refused]
    for level in engine.levels:
        its_turn = level == works[index % len(works)]
        always = level in engine.refused or (name in ("ddp", "fsdp by layer", "hsdp", "tp") and its_turn)
        (ALWAYS if always else LONG if its_turn or name in ("ddp", "fsdp by layer") else NIGHTLY).append((name, level))


@ranks(4, *ALWAYS, long=LONG, nightly=NIGHTLY)
def test_as_by_hand(name: str, level: str) -> None:
    """Bit for bit, or refused by name."""
    engine = engines.ENGINES[name]
    if level in engine.refused:
        with engines.refused(ValueError, *engine.refused[level]):
            engines.trained(engine, level, STEPS)
        return
    state = engines.trained(engine, level, STEPS)
    by_hand = engines.trained_by_hand(engine, level, STEPS)
    start = dict(engine.network().named_parameters())
    assert {value.dtype for value in state.values()} == {torch.float32}
    # With "model" gradients arrive together, so that DDP's buckets, and the hook's sums in float16, have another order.
    tolerance = 1e-4 if (name, level) == ("ddp hook fp16", "model") else 0
    for key, value in by_hand.items():
        assert not torch.equal(value, start[key]), f"{key} is not trained at all"
        assert_close(state[key], value, atol=tolerance, rtol=0, msg=lambda text, key=key: f"{key}: {text}")
    engines.assert_one(list(state.values()))


@ranks(
    4,
    *[("ddp no_sync", "O2", 20), ("fsdp by layer", "O2", 20)],
    long=[
        ("ddp", "O1", 20),
        ("ddp", "split", 50),
        ("ddp", "model", 50),
        ("fsdp by layer", "O1", 20),
        ("hsdp", "O2", 20),
        ("tp fsdp", "O2", 20),
    ],
    nightly=[("ddp", "O2", 50), ("hsdp", "O2", 50), ("tp fsdp", "O2", 50)],
)
def test_random_overflows(name: str, level: str, steps: int) -> None:
    """Let ranks overflow at random: all must skip, and have the same weights."""
    engine = engines.ENGINES[name]
    runs, model, optimizer = engines.pair(engine, level, loss_scale=mpinit.DynamicLossScale(init=2.0**12))
    group = engines.mesh(2, 2).get_group("outer") if name == "hsdp" else dist.group.WORLD
    chance = random.Random(dist.get_rank())
    for micros in engines.cycles(engine, steps):
        optimizer.zero_grad()
        before = engines.whole(model.state_dict())
        for loss in engines.passes(engine, runs, micros):
            factor = float("inf") if chance.random() < 0.06 else 1.0
            with mpinit.scale_loss(loss * factor, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        done, skipped = mpinit.step_counts(optimizer)
        engines.assert_one((mpinit.loss_scale(optimizer), done, skipped, bool(mpinit.step_was_skipped(optimizer))))
        if name.startswith("ddp") or name == "hsdp":
            engines.assert_one(model, group)
        if mpinit.step_was_skipped(optimizer):
            engines.assert_same(engines.whole(model.state_dict()), before)
    assert skipped >= steps // 10
    assert done >= steps // 10


def own_stage() -> nn.Module:
    model = text()
    stages = (model.embedding, *model.blocks, nn.Sequential(model.norm, model.head))
    return stages[dist.get_rank()]


def schedule_of(kind: str, stage: nn.Module, scale: list[Any]) -> Any:
    """A schedule whose losses are scaled by what is in the list."""
    made = PipelineStage(stage, dist.get_rank(), engines.RANKS, torch.device("cpu"))
    return SCHEDULES[kind](made, engines.RANKS, loss_fn=lambda output, y: engines.loss_of(output, y, len(y)) * scale[0])


def run(schedule: Any, batch: tuple[Tensor, Tensor]) -> None:
    x, y = (each.contiguous() for each in batch)  # torch 2.11 checks strides of what stages get
    first, last = dist.get_rank() == 0, dist.get_rank() == engines.RANKS - 1
    schedule.step(*((x,) if first else ()), **({"target": y} if last else {}))


@sums_in_float32()
def stages_by_hand(kind: str, level: str, steps: int) -> engines.State:
    dtype, scale = engines.DTYPES[level], engines.first_scale(LEVELS[level])
    stage = own_stage()
    weights = masters = dict(stage.named_parameters())
    runs = stage
    if dtype is not None and level != "model":
        masters = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        stage.to(dtype)
        engines.round_into(weights, masters, level)
    if dtype is not None:
        runs = engines.CastByHand(stage, dtype, casts_weights=level == "model")
    schedule, optimizer = schedule_of(kind, runs, [scale]), engines.sgd(masters.values())
    for batch in engines.batches(steps):
        for weight in weights.values():
            weight.grad = None
        run(schedule, batch)
        for weight, master in zip(weights.values(), masters.values(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.to(master.dtype) / scale
        optimizer.step()
        engines.round_into(weights, masters, level)
    return engines.whole(masters)


@ranks(4, ("1F1B", "split"), long=[("GPipe", "O0"), ("GPipe", "O2"), ("1F1B", "O2"), ("GPipe", "model")])
def test_stages_as_by_hand(kind: str, level: str) -> None:
    by_hand = stages_by_hand(kind, level, 3)
    stage = own_stage()
    optimizer = engines.sgd(stage.parameters())
    mpinit.initialize(stage, optimizer, process_group=dist.group.WORLD, **LEVELS[level])
    scale: list[Any] = [1.0]
    schedule = schedule_of(kind, stage, scale)
    for batch in engines.batches(3):
        optimizer.zero_grad()
        with mpinit.scale_loss(torch.ones(()), optimizer) as scale[0]:
            run(schedule, batch)
        optimizer.step()
    assert mpinit.step_counts(optimizer) == (3, 0)
    engines.assert_same(engines.whole(stage.state_dict()), by_hand)


def keywords(level: str) -> dict[str, Any]:
    return LEVELS[level] | DYNAMIC


def parts(count: int) -> list[tuple[Tensor, Tensor]]:
    return [engines.mine(batch) for batch in engines.batches(count)]


def backward(model: Any, optimizer: Any, batch: tuple[Tensor, Tensor], factor: float = 1.0) -> None:
    x, y = batch
    with mpinit.scale_loss(engines.loss_of(model(x), y, len(x)) * factor, optimizer) as scaled_loss:
        scaled_loss.backward()


def assert_all_one(model: nn.Module, optimizer: Any) -> None:
    """Masters and scales."""
    engines.assert_one([*model.state_dict().values(), torch.tensor([mpinit.loss_scale(optimizer)])])


def network(seed: int) -> nn.Module:
    """A model with numbers of its own."""
    torch.manual_seed(seed)
    model = text()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.01)
    return model


@ranks(4, ("O2",), long=[("split",), ("model",)])
def test_state_loaded_on_one_rank_reaches_all(level: str) -> None:
    """Masters and scale, when the model is wrapped."""
    model = network(seed=0)
    optimizer = engines.sgd(model.parameters())
    mpinit.initialize(model, optimizer, **keywords(level))
    state = network(seed=7).state_dict()
    if dist.get_rank() == 0:
        model.load_state_dict(state)
        mpinit.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 5}}, optimizer)
    wrapped = DistributedDataParallel(model)
    assert mpinit.loss_scale(optimizer) == 64.0
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    for batch in parts(2):
        optimizer.zero_grad()
        backward(wrapped, optimizer, batch)
        optimizer.step()
        assert_all_one(model, optimizer)
    assert mpinit.state_dict(optimizer)["loss_scaler0"]["unskipped"] == 7


@ranks(4, ("O2",), ("split",), long=[("O0",), ("model",)])
def test_averages_of_masters_are_one(level: str) -> None:
    """Local SGD: every rank steps by itself, then all have the mean of the masters; where one overflows all skip."""
    model = network(seed=0)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=1, warmup_steps=0))
    mpinit.initialize(model, optimizer, process_group=dist.group.WORLD, **keywords(level))
    for index, batch in enumerate(parts(4)):
        optimizer.zero_grad()
        bad = index == 1 and dist.get_rank() == 1
        backward(model, optimizer, batch, float("inf") if bad else 1.0)
        gradients = [parameter.grad.float().clone() for parameter in mpinit.master_params(optimizer)]
        optimizer.step()
        assert mpinit.step_was_skipped(optimizer) == (index == 1)
        assert_all_one(model, optimizer)
        for master, gradient in zip(masters, gradients, strict=True):
            master.sub_(gradient.nan_to_num(0, 0, 0) * (0.1 if index != 1 else 0.0))
        flat = torch.cat([master.flatten() for master in masters]) / 4
        dist.all_reduce(flat)
        parts_of_it = torch.split(flat, [master.numel() for master in masters])
        masters = [part.view_as(master).clone() for part, master in zip(parts_of_it, masters, strict=True)]
    for (name, ours), master in zip(model.state_dict().items(), masters, strict=True):
        torch.testing.assert_close(ours, master, msg=lambda text, name=name: f"{name}: {text}")


@ranks(4, ("O2",), long=[("split",), ("O1",)])
def test_local_sgd_under_a_wrapper(level: str) -> None:
    """Follow torch's recipe: gradients are averaged in groups, and masters over all ranks."""
    model = network(seed=0)
    inner = engines.sgd(model.parameters())
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    mpinit.initialize(model, optimizer, process_group=dist.group.WORLD, **keywords(level))
    wrapped = DistributedDataParallel(model)
    subgroup = dist.new_subgroups(group_size=2)[0]
    wrapped.register_comm_hook(PostLocalSGDState(None, subgroup, start_localSGD_iter=0), post_localSGD_hook)
    for index, batch in enumerate(parts(4)):
        optimizer.zero_grad()
        backward(wrapped, optimizer, batch, float("inf") if index == 1 and dist.get_rank() == 2 else 1.0)
        optimizer.step()
        assert mpinit.step_was_skipped(optimizer) == (index == 1)
        engines.assert_one((mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer)))
        first, same, other, _ = engines.on_all_ranks(next(iter(model.state_dict().values())))
        # Averaged are the first and the third step that are done.
        assert torch.equal(first, same) and torch.equal(first, other) == (index != 2)
    assert_all_one(model, optimizer)


@ranks(4, ("O1",), long=[("model",)])
def test_zero_redundancy_without_masters(level: str) -> None:
    """Compare with the optimizer inside it; with masters it is refused."""
    states = []
    for sharded in (False, True):
        model = network(seed=0)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        if sharded:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
            for refuses in ("O2", "O5", "split"):
                with engines.refused(ValueError, "ZeroRedundancyOptimizer", "fully_shard", 'master_weights="model"'):
                    mpinit.initialize(model, optimizer, **LEVELS[refuses])
        mpinit.initialize(model, optimizer, **keywords(level))
        wrapped = engines.ddp()(model, None)
        for index, batch in enumerate(parts(4)):
            optimizer.zero_grad()
            backward(wrapped, optimizer, batch, float("inf") if index == 1 and dist.get_rank() == 2 else 1.0)
            optimizer.step()
            assert mpinit.step_was_skipped(optimizer) == (index == 1)
        assert_all_one(model, optimizer)
        states.append(model.state_dict())
        mpinit.undo(model)
    assert all(map(torch.equal, states[0].values(), states[1].values()))


@ranks(4)
def test_memory_after_initialize() -> None:
    """Allocate a model of the meta device first; FSDP2's parameters stay the same objects."""
    for level in ("O1", "O2", "split", "model"):
        with torch.device("meta"):
            model = text()
        optimizer = engines.sgd(model.parameters())
        mpinit.initialize(model, optimizer, **keywords(level))
        model.to_empty(device="cpu")
        model.load_state_dict(network(seed=0).state_dict())
        with engines.refused(RuntimeError, "meta device", "to_empty", "mpinit.initialize last"):
            backward(DistributedDataParallel(model), optimizer, parts(1)[0])
        mpinit.undo(model)
        with engines.refused(ValueError, "meta device", "make the optimizer"):
            mpinit.initialize(model, optimizer, **keywords(level))
    with torch.device("meta"):
        model = engines.fsdp(4)(text(), None)
    optimizer = engines.sgd(model.parameters())
    mpinit.initialize(model, optimizer, **keywords("O2"))
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, network(seed=0).state_dict(), options=options)
    before = engines.whole(model.state_dict())
    backward(model, optimizer, parts(1)[0])
    optimizer.step()
    after = engines.whole(model.state_dict())
    assert not any(torch.equal(before[name], after[name]) for name in after)


STEPS_MATRIX = 4
QUIET: dict[str, Any] = {
    "ddp": engines.no_sync,
    "fsdp by layer": engines.unsynced,
    "hsdp": engines.unsynced,
    "tp fsdp": engines.unsynced,
}
NAMES = ("ddp", "fsdp by layer", "hsdp", "tp", "tp fsdp")
OVERFLOWS, ACCUMULATES, RESUMES = ("", "overflow"), ("", "no_sync"), ("", "checkpoint")
OPTIONS = list(itertools.product(OVERFLOWS, ACCUMULATES, RESUMES))
CELLS = list(itertools.product(NAMES, LEVELS, OVERFLOWS, ACCUMULATES, RESUMES))
# A long run has one of the eight combinations of options for each engine and level. Numbers 0, 3, 5, 6 and 7 together
# have all pairs of two options. "^" exchanges the two values of an option, which keeps that. So all levels have all
# pairs of two options, and all engines have all combinations.
LONG_CELLS = [
    (name, level, *OPTIONS[chosen ^ (row % len(OPTIONS))])
    for name, chosen in zip(NAMES, (0, 3, 5, 6, 7), strict=True)
    for row, level in enumerate(LEVELS)
]


def test_long_cells_have_every_pair_of_options_at_every_level() -> None:
    for first, second in itertools.combinations(range(2, 5), 2):
        for column in (0, 1):
            found = {(cell[column], cell[first], cell[second]) for cell in LONG_CELLS}
            assert len(found) == len({cell[column] for cell in CELLS}) * 4
    assert {(cell[0], *cell[2:]) for cell in LONG_CELLS} == {(cell[0], *cell[2:]) for cell in CELLS}


def built(engine: engines.Engine, level: str, overflows: bool) -> Any:
    scaling: dict[str, Any] = {"loss_scale": mpinit.DynamicLossScale(init=1024.0)} if overflows else {}
    return engines.pair(engine, level, **scaling)


@ranks(4, ("ddp", "O2", "overflow", "no_sync", "checkpoint"), long=LONG_CELLS, nightly=CELLS)
def test_cell(name: str, level: str, overflow: str, accumulates: str, resumes: str) -> None:
    """Compare with a loop by hand without the skipped step, O1 and O4 with float32; or all ranks refuse."""
    # DDP sorts gradients into other buckets after its first step, and would not resume to the bit.
    engine = (
        replace(engines.ENGINES[name], wrap=engines.ddp(find_unused_parameters=True))
        if name == "ddp"
        else engines.ENGINES[name]
    )
    if accumulates:
        quiet = QUIET.get(name, engine.quiet)
        if quiet is engines.unsynced and (overflow or engines.first_scale(LEVELS[level]) != 1.0):
            quiet = engine.quiet  # refused under a loss scale
        engine = replace(engine, micros=2, quiet=quiet)
    start = time.monotonic()
    if level in engine.refused:
        with engines.refused(ValueError, *engine.refused[level]):
            built(engine, level, bool(overflow))
        assert time.monotonic() - start < 10
        return
    runs, model, optimizer = built(engine, level, bool(overflow))
    for index, micros in enumerate(engines.cycles(engine, STEPS_MATRIX)):
        if resumes and index == 2:
            saved = copy.deepcopy(mpinit.TrainState(runs, optimizer).state_dict())
            mpinit.undo(model)
            runs, model, optimizer = built(engine, level, bool(overflow))
            mpinit.TrainState(runs, optimizer).load_state_dict(saved)
        bad = bool(overflow) and index == 1
        optimizer.zero_grad()
        for loss in engines.passes(engine, runs, micros):
            factor = float("inf") if bad and dist.get_rank() == 2 else 1.0
            with mpinit.scale_loss(loss * factor, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        assert bool(mpinit.step_was_skipped(optimizer)) == bad
        engines.assert_one(mpinit.loss_scale(optimizer))
    state = engines.whole(model.state_dict())
    engines.assert_one(list(state.values()))
    # A second pass in a block adds to tensor parallel gradients in float32, and one by hand in 16 bit.
    sums = name == "tp" and bool(accumulates)
    exact = level in engines.DTYPES and not (level == "O3" or (engine.has_policy and level == "split"))
    by_hand = engines.trained_by_hand(engine, level if exact else "O0", STEPS_MATRIX, skips=(1,) if overflow else ())
    if exact and not sums and not (overflow and level == "O0"):
        engines.assert_same(state, by_hand)
    for key, value in by_hand.items():
        assert_close(state[key], value, atol=2e-2, rtol=2e-2, msg=lambda text, key=key: f"{key}: {text}")
