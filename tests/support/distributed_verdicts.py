"""Checks for two processes of one verdict on overflow, one norm, and FSDP2 around a session; see distributed_worker."""

from __future__ import annotations

import functools
import random
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from distributed_replicas import CASE, LEVELS, are_one, mine, on_all_ranks, refused, state_of
from models import train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mpinit

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it scripts what torch itself deprecates
    from torch.distributed.optim import ZeroRedundancyOptimizer

OVERFLOWS = [("ddp", "O2"), ("ddp", "split"), ("fsdp", "O2"), ("fsdp", "O1", "scaler")]
SCALED = {"init_loss_scale": 1024.0, "verbosity": 0}


@functools.cache
def mesh_of_two() -> Any:
    return init_device_mesh("cpu", (2,))


def sharded(**policy: Any) -> nn.Module:
    model = CASE.build()
    fully_shard(model.layer, mesh=mesh_of_two(), **policy)
    return fully_shard(model, mesh=mesh_of_two(), **policy)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def backward(model: Any, optimizer: Any, batch: Any, factor: float = 1.0, **more: Any) -> None:
    with mpinit.scale_loss(CASE.loss(model(batch[0]), batch[1]) * factor, optimizer, **more) as scaled_loss:
        scaled_loss.backward()


# -- one verdict ------------------------------------------------------------------------------------------------------


def a_cycle_takes_one_round_and_replicas_none(engine: str) -> None:
    model = CASE.build() if engine == "ddp" else sharded()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O2", **SCALED)
    wrapped = DistributedDataParallel(model) if engine == "ddp" else model
    batches = mine(CASE.batches(4))
    backward(wrapped, optimizer, batches[0])
    optimizer.step()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
        for index, batch in enumerate(batches[1:]):
            backward(wrapped, optimizer, batch, delay_unscale=index < 2)
        optimizer.step()
    assert sent.call_count == (0 if engine == "ddp" else 1), sent.call_count
    assert mpinit.step_counts(optimizer) == (2, 0)


def random_overflows_leave_all_ranks_one(engine: str, level: str, loop: str = "") -> None:
    model = CASE.build() if engine == "ddp" else sharded()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, **LEVELS[level] | {"loss_scale": "dynamic"}, verbosity=0)
    wrapped = DistributedDataParallel(model) if engine == "ddp" else model
    chance = random.Random(dist.get_rank())
    scaler = mpinit.GradScaler(optimizer) if loop else mock.Mock()
    for batch in mine(CASE.batches(12)):
        optimizer.zero_grad()
        factor = float("inf") if chance.random() < 0.3 else 1.0
        if loop == "scaler":
            scaler.scale(CASE.loss(wrapped(batch[0]), batch[1]) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            backward(wrapped, optimizer, batch, factor)
            optimizer.step()
        known = mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer), mpinit.step_was_skipped(optimizer)
        first, second = on_all_ranks(known)
        assert first == second
        assert engine == "fsdp" or are_one(model)
    assert 0 < mpinit.step_counts(optimizer)[1] < 12


class Experts(nn.Module):
    """A layer that all ranks run, and a sharded one that only those run which have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(4, 4)
        self.expert = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh_of_two(), [Shard(0)]))

    def forward(self, x: Tensor, has_tokens: bool) -> Tensor:
        y: Tensor = self.common(x)
        return y + self.expert.to_local().sum() if has_tokens else y


def an_expert_without_tokens_keeps_nobody_waiting(level: str) -> None:
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, level, **SCALED)
    for bad in (False, True, False):
        optimizer.zero_grad()
        has_tokens = dist.get_rank() == 0
        loss = model(torch.ones(2, 4), has_tokens).square().mean() * (float("inf") if bad and has_tokens else 1.0)
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert mpinit.step_was_skipped(optimizer) == bad
        assert on_all_ranks(mpinit.loss_scale(optimizer)) == [mpinit.loss_scale(optimizer)] * 2
    assert mpinit.loss_scale(optimizer) == 512.0


def stages_skip_together(kind: str) -> None:
    """A pipeline: every rank trains a stage of its own, plain or sharded over a mesh of its own."""
    stage: nn.Module = nn.Linear(4, 4)
    given: dict[str, Any] = {"process_group": dist.group.WORLD}
    if kind == "mesh":
        fully_shard(stage, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"])
        with refused(ValueError, "1 of 2 ranks", "process_group"):
            mpinit.initialize(stage, torch.optim.SGD(stage.parameters(), lr=0.1), "O2", **SCALED)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    mpinit.initialize(stage, optimizer, "O2", **SCALED, **given)
    for step in range(4):
        optimizer.zero_grad()
        with mpinit.scale_loss(torch.ones(()), optimizer) as scale:
            bad = step == 1 and dist.get_rank() == 1
            (stage(torch.ones(2, 4)).mean() * scale * (float("nan") if bad else 1.0)).backward()
        optimizer.step()
        assert mpinit.step_was_skipped(optimizer) == (step == 1)
        assert mpinit.loss_scale(optimizer) == (1024.0 if step == 0 else 512.0)


def parameters_outside_of_the_wrapper_skip_with_it() -> None:
    model, head = CASE.build(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), head], lr=0.1)
    mpinit.initialize(model, optimizer, "O2", **SCALED)
    wrapped = DistributedDataParallel(model)
    for step, (x, y) in enumerate(mine(CASE.batches(3))):
        optimizer.zero_grad()
        bad = step == 1 and dist.get_rank() == 1
        with mpinit.scale_loss(CASE.loss(wrapped(x), y) + head.sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            if bad:
                assert head.grad is not None
                head.grad.fill_(float("nan"))
        optimizer.step()
        assert mpinit.step_was_skipped(optimizer) == (step == 1)
    assert are_one(model)


def process_groups_are_checked() -> None:
    model = nn.Linear(2, 2)
    with refused(TypeError, "ProcessGroup"):
        mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", process_group="world", verbosity=0)


# -- one norm ---------------------------------------------------------------------------------------------------------


def gradients_of_any_meshes_are_clipped_as_in_one_process(order: float) -> None:
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    wholes = [torch.randn(5, 4) * 3 for _ in range(5)]
    line = mesh_of_two()

    def parameter(whole: Tensor, mesh: Any, placements: Any) -> nn.Parameter:
        made = nn.Parameter(distribute_tensor(torch.zeros(5, 4), mesh, placements))
        made.grad = distribute_tensor(whole, mesh, placements)
        return made

    plain = nn.Parameter(torch.zeros(5, 4))
    plain.grad = wholes[0].clone()
    partial = nn.Parameter(distribute_tensor(torch.zeros(5, 4), line, [Replicate()]))
    partial.grad = DTensor.from_local(wholes[4] * (0.25, 0.75)[dist.get_rank()], line, [Partial()])
    untouched = nn.Parameter(distribute_tensor(torch.zeros(5, 4), grid, [Shard(0), Shard(1)]))
    several = [
        plain,
        parameter(wholes[1], line, [Shard(0)]),
        parameter(wholes[2], grid, [Shard(1), Replicate()]),
        parameter(wholes[3], line, [Replicate()]),
        partial,
        untouched,
    ]
    alone = [nn.Parameter(torch.zeros(5, 4)) for _ in wholes]
    for one, whole in zip(alone, wholes, strict=True):
        one.grad = whole.clone()
    expected = nn.utils.clip_grad_norm_(alone, 1.0, order)
    optimizer = torch.optim.SGD(several, lr=0.1)
    mpinit.initialize([], optimizer, "O1", verbosity=0)
    total = mpinit.clip_grad_norm_(optimizer, 1.0, order)
    torch.testing.assert_close(total, expected)
    assert on_all_ranks(total.item()) == [total.item()] * 2
    for ours, theirs in zip(several, alone, strict=False):
        got = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(got, theirs.grad)


def stages_are_clipped_as_one_model() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    mpinit.initialize([], optimizer, "O1", verbosity=0)
    parameter.grad = torch.tensor([(3.0, 4.0)[dist.get_rank()]])
    assert mpinit.clip_grad_norm_(optimizer, 1.0, process_group=dist.group.WORLD).item() == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([(0.6, 0.8)[dist.get_rank()]]))


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


def what_is_made_before_sharding_is_refused() -> None:
    model = CASE.build()
    optimizer = sgd(model)
    fully_shard(model, mesh=mesh_of_two())
    for level in ("O1", "O2"):
        with refused(ValueError, "made before fully_shard"):
            mpinit.initialize(model, optimizer, level, verbosity=0)
    for level, more in (("O1", {}), ("O2", {}), ("O5", {}), ("O2", {"master_weights": "model"})):
        model = CASE.build()
        optimizer = sgd(model)
        mpinit.initialize(model, optimizer, level, **SCALED, **more)
        fully_shard(model.layer, mesh=mesh_of_two())
        with refused(RuntimeError, "layer.", "fully_shard"):
            train(model, optimizer, mine(CASE.batches(1)), CASE.loss)
        mpinit.undo(model)
    model = CASE.build()
    mpinit.initialize(model, opt_level="O5", await_optimizers=True, verbosity=0)
    fully_shard(model, mesh=mesh_of_two())
    with refused(RuntimeError, "fully_shard"):
        mpinit.add_optimizers(sgd(model))


def shards_are_the_masters(level: str) -> None:
    """Bit for bit what a loop by hand comes to on FSDP2's own policy; writes to shards stay."""
    dtype = torch.float16 if level == "O2" else torch.bfloat16
    batches = mine(CASE.batches(4))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = sharded(mp_policy=policy)
    optimizer = sgd(model)
    for x, y in batches:
        optimizer.zero_grad()
        scale = 1024.0 if level == "O2" else 1.0
        (CASE.loss(model(x).float(), y) * scale).backward()
        for parameter in model.parameters():
            parameter.grad.div_(scale)
        optimizer.step()
        write(model)
    expected = state_of(model)
    model = sharded()
    optimizer = sgd(model)
    before = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[level])
    assert {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} == before
    seen: set[torch.dtype] = set()
    handle = model.layer.linear1.register_forward_pre_hook(lambda module, _: seen.add(module.weight.dtype))
    for batch in batches:
        optimizer.zero_grad()
        backward(model, optimizer, batch)
        optimizer.step()
        write(model)
    handle.remove()
    assert seen == {dtype}
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(state_of(model), expected, strict=True))
    mpinit.undo(model)
    handle = model.layer.linear1.register_forward_pre_hook(lambda module, _: seen.add(module.weight.dtype))
    CASE.loss(model(batches[0][0]), batches[0][1]).backward()
    assert seen == {dtype, torch.float32}


def write(model: Any) -> None:
    """In all the ways that leave no trace on a DTensor."""
    weights = [parameter for parameter in model.parameters() if parameter.to_local().numel()]
    with torch.no_grad():
        weights[0].data.mul_(1.0001)
        weights[1].to_local().mul_(1.0001)
        weights[2]._local_tensor.data.mul_(1.0001)
        weights[3].mul_(1.0001)


def a_policy_that_contradicts_the_level_is_refused() -> None:
    for level, other in (("O2", torch.bfloat16), ("O5", torch.float16), ("O3", torch.bfloat16)):
        model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=other))
        with refused(ValueError, "MixedPrecisionPolicy", str(other)):
            mpinit.initialize(model, sgd(model), level, verbosity=0)
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O5", verbosity=0)
    train(model, optimizer, mine(CASE.batches(1)), CASE.loss)


def undo_after_a_failed_forward(level: str) -> None:
    model = sharded()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[level])
    before = state_of(model)

    def fail(*_: Any) -> None:
        raise KeyError("in the forward")

    handle = model.layer.linear2.register_forward_hook(fail)
    batch = mine(CASE.batches(1))[0]
    with refused(KeyError):
        backward(model, optimizer, batch)
    handle.remove()
    mpinit.undo(model)
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(state_of(model), before, strict=True))
    CASE.loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


# -- others -----------------------------------------------------------------------------------------------------------


def zero_redundancy_is_sent_to_fsdp2() -> None:
    model = CASE.build()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    with refused(ValueError, "ZeroRedundancyOptimizer", "fully_shard"):
        mpinit.initialize(model, optimizer, "O2", verbosity=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def a_step_without_any_gradient_is_told_once() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    mpinit.initialize([model], optimizer, "O1", verbosity=0, loss_scale=8.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with mpinit.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    assert ["does nothing" in str(warning.message) for warning in caught].count(True) == 1
