"""One verdict of all ranks, at places that each of them passes: scales, counts, and how much is sent."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import engines
import torch
import torch.distributed as dist
from engines import refused, text
from models import LEVELS, dynamic
from processes import ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import mpinit

INF = float("inf")
# Gradients of the losses below overflow above 2**10, whatever the model.
HIGH: dict[str, Any] = {"loss_scale": mpinit.DynamicLossScale(init=2.0**14)}
OVERFLOWS = 4


def averaged(model: nn.Module) -> None:
    """Average gradients by hand."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


def built(kind: str, level: str, **more: Any) -> tuple[Any, nn.Module, Any]:
    """A model on two ranks or one."""
    model: Any = engines.sharded(engines.mesh(dist.get_world_size())) if kind == "fsdp" else engines.CASE.build()
    optimizer = engines.sgd_of(model)
    given = {"process_group": dist.group.WORLD} if kind == "by hand" else {}
    mpinit.initialize(model, optimizer, **LEVELS[level] | HIGH | given | more)
    return DistributedDataParallel(model) if kind in ("ddp", "ddp no_sync") else model, model, optimizer


def backward(kind: str, runs: Any, model: nn.Module, optimizer: Any, batch: Any, factor: Any, **more: Any) -> None:
    """A loss that overflows where ``factor(scale)`` is infinite."""
    quiet = kind == "ddp no_sync"
    with runs.no_sync() if quiet else contextlib.nullcontext():
        loss = engines.CASE.loss(runs(batch[0]), batch[1])
        with mpinit.scale_loss(loss, optimizer, **more) as scaled_loss:
            (scaled_loss * factor(mpinit.loss_scale(optimizer))).backward()
    if kind == "by hand":
        averaged(model)


def above(limit: float, rank: int | None = None) -> Callable[[float], float]:
    return lambda scale: INF if scale > limit and rank in (None, dist.get_rank()) else 1.0


def losing(kind: str, level: str, rank: int | None, sets_to_none: bool = True) -> None:
    """A loop that looks at its own norm, and leaves out its steps."""
    runs, model, optimizer = built(kind, level)
    batches = [engines.mine(batch) for batch in engines.CASE.batches(OVERFLOWS + 2)]
    scales, stepped = [], 0
    for batch in batches:
        optimizer.zero_grad(set_to_none=sets_to_none)
        backward(kind, runs, model, optimizer, batch, above(2.0**10, rank))
        norm = mpinit.clip_grad_norm_(optimizer, 1.0)
        scales.append(mpinit.loss_scale(optimizer))
        if not torch.isfinite(norm):
            continue
        optimizer.step()
        stepped += 1
    scales.append(mpinit.loss_scale(optimizer))
    assert stepped == 2
    assert mpinit.step_counts(optimizer) == (2, OVERFLOWS)
    assert scales[-1] == 2.0**10
    engines.assert_one(scales[-1])
    if kind != "fsdp":
        engines.assert_one(model)


LOOPS = [(kind, level) for kind in ("ddp", "fsdp", "by hand") for level in ("O1", "O2")]


@ranks(1, ("alone", "O2"), ("ddp", "O2"), long=[*LOOPS, ("alone", "O1")])
def test_scale_backs_off_without_steps_on_one_rank(kind: str, level: str) -> None:
    losing(kind, level, None)
    losing(kind, level, None, sets_to_none=False)


@ranks(2, ("ddp", "O2"), ("fsdp", "O2"), ("by hand", "O2"), long=LOOPS)
def test_scale_backs_off_without_steps(kind: str, level: str) -> None:
    """Also where the gradients of one rank alone overflow before they are reduced."""
    losing(kind, level, None)
    losing(kind, level, 1)


@ranks(2, ("ddp",), ("fsdp",), ("by hand",))
def test_too_many_overflows_are_refused_without_steps(kind: str) -> None:
    runs, model, optimizer = built(kind, "O2", loss_scale=mpinit.DynamicLossScale(max_consecutive_skips=3))
    batch = engines.mine(engines.CASE.batches(1)[0])

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            backward(kind, runs, model, optimizer, batch, lambda _: INF)

    train(3)
    with refused(RuntimeError, "3 steps in a row were skipped", "max_consecutive_skips"):
        train(1)


@ranks(2)
def test_overflow_under_no_sync_counts_where_gradients_are_reduced() -> None:
    """Clear an overflow of one rank before the reduction: no scale moves, and no ranks part."""
    model = engines.CASE.build()
    optimizer = engines.sgd_of(model)
    mpinit.initialize(model, optimizer, **LEVELS["O2"] | HIGH)
    wrapped = DistributedDataParallel(model)
    for index, batch in enumerate(map(engines.mine, engines.CASE.batches(6))):
        optimizer.zero_grad()
        bad = index in (1, 3) and dist.get_rank() == 1
        backward("ddp no_sync", wrapped, model, optimizer, batch, lambda _, bad=bad: INF if bad else 1.0)
        if index == 1 and bad:
            optimizer.zero_grad()
        if index == 3:
            for parameter in model.parameters():
                parameter.grad.nan_to_num_(1e-3, 1e-3, 1e-3)
        backward("ddp", wrapped, model, optimizer, batch, lambda _: 1.0)
        optimizer.step()
        engines.assert_one((mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer)))
        engines.assert_one(model)
    assert mpinit.step_counts(optimizer) == (6, 0)


def change_scale(way: str, runs: Any, model: nn.Module, optimizer: Any, batch: Any, on_rank: int | None) -> None:
    """Change the loss scale on one rank, or on both, without a verdict."""
    here = on_rank in (None, dist.get_rank())
    scaler, factor = mpinit.GradScaler(optimizer), INF if here else 1.0
    if way in ("no_sync", "module inside"):
        with runs.no_sync() if way == "no_sync" else contextlib.nullcontext():
            engines.backward(runs if way == "no_sync" else model, optimizer, batch, factor)
        optimizer.step()
    elif way == "unscale_":
        with runs.no_sync():
            scaler.scale(engines.CASE.loss(runs(batch[0]), batch[1]) * factor).backward()
        scaler.unscale_(optimizer)
        scaler.update()
    elif here and way == "interval":
        scaler.set_growth_interval(3)
    elif here:
        scaler.scale(torch.ones(()))
        scaler.update(64.0)
    optimizer.zero_grad()


def train_by(loop: str, runs: Any, optimizer: Any, batch: Any, factor: float = 1.0, omits: bool = False) -> None:
    """Run one iteration; a rank that ``omits`` its step updates the scale all the same."""
    optimizer.zero_grad()
    if loop == "scale_loss":
        engines.backward(runs, optimizer, batch, factor)
        if not omits:
            optimizer.step()
    else:
        scaler = mpinit.GradScaler(optimizer)
        scaler.scale(engines.CASE.loss(runs(batch[0]), batch[1]) * factor).backward()
        scaler.unscale_(optimizer)
        if not omits:
            scaler.step(optimizer)
        scaler.update()


WAYS = ("no_sync", "module inside", "unscale_", "set", "interval")


@ranks(
    2,
    ("no_sync", "scale_loss"),
    ("set", "GradScaler"),
    long=[(a, b) for a in WAYS for b in ("scale_loss", "GradScaler")],
)
def test_scale_that_one_rank_changes_is_refused_before_gradients_are_averaged(way: str, loop: str) -> None:
    runs, model, optimizer = built("ddp", "O2")
    batches = [engines.mine(batch) for batch in engines.CASE.batches(3)]
    train_by(loop, runs, optimizer, batches[0])
    change_scale(way, runs, model, optimizer, batches[1], on_rank=1)
    before = engines.whole(model.state_dict())
    refuses = dist.get_rank() == 1
    start = time.monotonic()
    refusal = refused(RuntimeError, "loss scales of this rank", "process_group")
    with mock.patch("mpinit.distributed.agreement._TIMEOUT", 1.0), refusal if refuses else contextlib.nullcontext():
        train_by(loop, runs, optimizer, batches[2])
    assert time.monotonic() - start < 15.0
    if refuses:
        engines.assert_same(engines.whole(model.state_dict()), before)


@ranks(
    2,
    ("unscale_", "scale_loss"),
    ("set", "GradScaler"),
    long=[(a, b) for a in WAYS for b in ("scale_loss", "GradScaler")],
)
def test_scale_that_all_ranks_change_alike_trains_on(way: str, loop: str) -> None:
    """Also if one rank omits the steps around an overflow."""
    runs, model, optimizer = built("ddp", "O2", loss_scale=mpinit.DynamicLossScale(growth_interval=2))
    batches = [engines.mine(batch) for batch in engines.CASE.batches(6)]
    train_by(loop, runs, optimizer, batches[0])
    change_scale(way, runs, model, optimizer, batches[1], on_rank=None)
    omits = dist.get_rank() == 1
    start = time.monotonic()
    train_by(loop, runs, optimizer, batches[2], factor=INF if omits else 1.0, omits=omits)
    train_by(loop, runs, optimizer, batches[3], omits=omits)
    for batch in batches[4:]:
        train_by(loop, runs, optimizer, batch)
        engines.assert_one(mpinit.loss_scale(optimizer))
    assert time.monotonic() - start < 6.0, "a rank has waited for another until the timeout"


@ranks(2)
def test_local_steps_in_a_process_group_are_skipped_together() -> None:
    runs, model, optimizer = built("ddp", "O2", process_group=dist.group.WORLD)
    for index, batch in enumerate(map(engines.mine, engines.CASE.batches(4))):
        optimizer.zero_grad()
        bad = index == 1 and dist.get_rank() == 1
        with runs.no_sync() if index < 3 else contextlib.nullcontext():
            engines.backward(runs, optimizer, batch, INF if bad else 1.0)
        optimizer.step()
        if index == 2:
            with mpinit.float32_weights(model), torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.div_(2)
            engines.assert_one(model)
    assert mpinit.step_counts(optimizer) == (3, 1)
    engines.assert_one(mpinit.loss_scale(optimizer))


WRITERS: dict[str, Callable[[Any], None]] = {
    "in place": lambda weight: weight.grad.fill_(INF),
    "replaced": lambda weight: setattr(weight, "grad", weight.grad * float("nan")),
    "through data": lambda weight: weight.grad.data.view(-1)[-1].mul_(INF),
}


@ranks(
    2,
    *[("block", "O2", "in place"), ("GradScaler", "O1", "replaced"), ("closure", "O2", "in place")],
    long=[(way, "O2", write) for way in ("block", "GradScaler", "closure") for write in WRITERS],
)
def test_inf_that_one_rank_writes_after_the_reduction_is_refused(way: str, level: str, write: str) -> None:
    """Clip before, which is right; overflows of all ranks are skipped."""
    runs, model, optimizer = built("ddp", level, **dynamic(level, init=1024.0))
    for index, batch in enumerate(map(engines.mine, engines.CASE.batches(4))):
        last = index == 3 and dist.get_rank() == 1

        def writing(last: bool = last) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if last:
                WRITERS[write](list(model.parameters())[-1])

        before = engines.whole(model.state_dict())
        refusal = refused(RuntimeError, "inf or nan came into gradients") if last else contextlib.nullcontext()
        with refusal:
            run_and_write(way, runs, optimizer, batch, INF if index == 1 and dist.get_rank() == 0 else 1.0, writing)
        if last:
            engines.assert_same(engines.whole(model.state_dict()), before)
        if index < 3:
            engines.assert_one((mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer)))
            engines.assert_one(model)
    skipped = int(way != "closure")  # a closure is evaluated again
    assert mpinit.step_counts(optimizer) == (4 - skipped - dist.get_rank(), skipped)


def run_and_write(
    way: str, runs: nn.Module, optimizer: Any, batch: Any, factor: float, write: Callable[[], None]
) -> None:
    """Run one iteration that writes to gradients between their reduction and the step."""
    optimizer.zero_grad()
    scaler, factors = mpinit.GradScaler(optimizer), [factor]
    if way == "closure":

        def closure() -> None:
            optimizer.zero_grad()
            engines.backward(runs, optimizer, batch, factors.pop() if factors else 1.0)
            write()

        optimizer.step(closure)
    elif way == "block":
        engines.backward(runs, optimizer, batch, factor)
        write()
        optimizer.step()
    else:
        scaler.scale(engines.CASE.loss(runs(batch[0]), batch[1]) * factor).backward()
        scaler.unscale_(optimizer)
        write()
        scaler.step(optimizer)
        scaler.update()


@ranks(2, ("fsdp",), ("by hand",), ("two losses",))
def test_overflow_beside_a_step_that_one_rank_leaves_out(kind: str) -> None:
    """Back the scale off on both ranks; the one that steps skips."""
    losses = {"num_losses": 2} if kind == "two losses" else {}
    runs, model, optimizer = built("ddp" if losses else kind, "O2", **losses)
    for index, batch in enumerate(map(engines.mine, engines.CASE.batches(4))):
        optimizer.zero_grad()
        bad = index == 1 and dist.get_rank() == 0
        backward("ddp" if losses else kind, runs, model, optimizer, batch, lambda _, bad=bad: INF if bad else 1.0)
        if not (index == 1 and dist.get_rank() == 1):
            optimizer.step()
    assert mpinit.loss_scale(optimizer) == 2.0**13
    assert mpinit.step_counts(optimizer) == (3, 1)
    engines.assert_one(mpinit.loss_scale(optimizer))


@ranks(2, ("block",), ("GradScaler",))
def test_ranks_that_step_other_optimizers_are_refused(way: str) -> None:
    """Compare whose gradients a verdict is for: an overflow of one optimizer's would skip the other's step."""
    model: Any = engines.sharded(engines.mesh(2))
    parameters = list(model.parameters())
    halves = [engines.sgd(parameters[:4]), engines.sgd(parameters[4:])]
    mpinit.initialize(model, halves, **LEVELS["O2"] | HIGH)
    before = engines.whole(model.state_dict())
    mine, scaler = halves[dist.get_rank()], mpinit.GradScaler(halves)
    x, y = engines.mine(engines.CASE.batches(1)[0])
    loss = engines.CASE.loss(model(x), y)
    start = time.monotonic()
    with refused(RuntimeError, "step different optimizers"):
        if way == "GradScaler":
            scaler.scale(loss).backward()
            scaler.step(mine)
        else:
            with mpinit.scale_loss(loss, mine) as scaled_loss:
                scaled_loss.backward()
    assert time.monotonic() - start < 15.0
    engines.assert_same(engines.whole(model.state_dict()), before)


@ranks(2, ("cleared",), ("kept",))
def test_ranks_that_average_by_hand_may_add_up_other_numbers_of_passes(end: str) -> None:
    """Train as plain torch does; one that leaves out a step keeps no other waiting."""
    states = []
    for is_plain in (True, False):
        model = engines.CASE.build()
        optimizer = engines.sgd_of(model)
        if not is_plain:
            mpinit.initialize(model, optimizer, "O1", loss_scale="dynamic", process_group=dist.group.WORLD)
            mpinit.undo(model)
            mpinit.initialize(model, optimizer, "O0", loss_scale="dynamic", process_group=dist.group.WORLD)
        for index, batch in enumerate(map(engines.mine, engines.CASE.batches(3))):
            optimizer.zero_grad()
            for _ in range(3 if index == 1 and dist.get_rank() == 0 and end == "kept" else 1):
                loss = engines.CASE.loss(model(batch[0]), batch[1])
                with contextlib.nullcontext(loss) if is_plain else mpinit.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            averaged(model)
            if index == 1 and dist.get_rank() == 1 and end == "cleared":
                continue
            optimizer.step()
        states.append(engines.whole(model.state_dict()))
    engines.assert_close(*states, tolerance=1e-6)


def stages(kind: str) -> list[nn.Module]:
    model = text()
    model.embedding.requires_grad_(kind != "frozen")
    return [model.embedding, nn.Sequential(*model.blocks, model.norm, model.head)]


def pipeline(kind: str, level: str, leaves_out: bool, is_plain: bool) -> engines.State:
    """Two stages, one of them with nothing to train, or with two optimizers."""
    rank = dist.get_rank()
    stage = stages(kind)[rank]
    parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    parts = [parameters[:4], parameters[4:]] if kind == "two optimizers" and rank == 1 else [parameters]
    optimizers = [engines.sgd(part) for part in parts if part]
    if not is_plain:
        group = {"process_group": dist.group.WORLD}
        mpinit.initialize(stage, optimizers or None, **LEVELS[level] | HIGH | {"loss_scale": "dynamic"} | group)
    scale: list[Any] = [1.0]
    made = PipelineStage(stage, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(made, 2, loss_fn=lambda y, target: engines.loss_of(y, target, len(target)) * scale[0])
    for index, (x, y) in enumerate(engines.batches(5)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = bool(optimizers) and not is_plain
        with mpinit.scale_loss(torch.ones(()), optimizers) if losses else contextlib.nullcontext(1.0) as scale[0]:
            schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == 1 else {}))
            if index == 2 and optimizers and rank == 1 and not is_plain:
                optimizers[-1].param_groups[0]["params"][0].grad.fill_(INF)
        for optimizer in optimizers:
            if (index != 2 or not is_plain) and not (leaves_out and index == 3 and rank == 1):
                optimizer.step()
    if not is_plain:
        for optimizer in optimizers:
            missed = leaves_out and rank == 1
            assert mpinit.step_counts(optimizer) == (4 - missed, 1)
            assert mpinit.loss_scale(optimizer) == 2.0**13
    return engines.whole(stage.state_dict())


@ranks(
    2,
    ("frozen", "O0", False),
    ("two optimizers", "O0", True),
    long=[(kind, "O0", out) for kind in ("plain", "frozen", "two optimizers") for out in (False, True)],
)
def test_stages_with_other_numbers_of_optimizers(kind: str, level: str, leaves_out: bool) -> None:
    """Skip a step on all stages that overflowed in one; none waits for a stage that leaves one out."""
    ours = pipeline(kind, level, leaves_out, is_plain=False)
    engines.assert_close(ours, pipeline(kind, level, leaves_out, is_plain=True), tolerance=1e-6)


class Collectives(TorchDispatchMode):
    """A count of what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.counts[func.__name__.partition(".")[0].strip("_")] += 1
        return func(*args, **kwargs or {})


def sent(name: str, level: str | None, losses: int = 1, **more: Any) -> Counter[str]:
    """Count what a step sends, by mpinit or in plain torch."""
    engine = engines.ENGINES[name]
    more = {"num_losses": losses, "loss_scale": "dynamic"} | more
    if level is None:
        model = runs = engine.wrap(engine.network(), None)
        optimizer = engines.sgd(model.parameters())
    else:
        runs, model, optimizer = engines.pair(engine, level, **more)
    counted = Collectives()
    for index, micros in enumerate(engines.cycles(engine, 3)):
        with counted if index == 2 else contextlib.nullcontext():
            optimizer.zero_grad()
            for number, loss in enumerate(engines.passes(engine, runs, micros)):
                with (
                    contextlib.nullcontext(loss)
                    if level is None
                    else mpinit.scale_loss(loss, optimizer, loss_id=number % losses)
                ) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()
    if level is not None:
        mpinit.undo(model)
    return counted.counts


# The table of docs/how-to/distributed.md: what mpinit sends in a step beside what the engine itself does.
SENT = {
    ("ddp", 1): 0,
    ("ddp no_sync", 1): 0,
    ("ddp no_sync", 2): 1,
    ("fsdp by layer", 1): 1,
    ("fsdp unsynced", 1): 1,
    ("hsdp", 1): 2,
    ("tp", 1): 1,
    ("tp fsdp", 1): 2,
}


@ranks(4, *[(*case, count) for case, count in SENT.items()])
def test_collectives_of_a_step(name: str, losses: int, count: int) -> None:
    ours, plain = sent(name, "O1", losses), sent(name, None)
    assert plain, "nothing was counted"
    assert ours - plain == Counter({"allreduce": count} if count else {}), (ours, plain)
    assert not plain - ours


@ranks(4, ("fsdp by layer",), long=[("hsdp",), ("tp",), ("tp fsdp",)])
def test_nothing_is_sent_where_no_step_is_skipped(name: str) -> None:
    """Count with a static scale and without skips: no overflow is to be agreed on."""
    ours, plain = sent(name, "O4", loss_scale=1.0, skip_nonfinite=False), sent(name, None)
    assert ours == plain, (ours, plain)
