"""Models that FSDP2 has sharded over two processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from engines import (
    BF16,
    CASE,
    F16,
    F32,
    TOLERANCE,
    assert_close,
    assert_one,
    assert_same,
    backward,
    by_itself,
    mesh,
    mine,
    refused,
    sgd_of,
    sharded,
    whole,
)
from models import LEVELS, level_arguments, train
from processes import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import mpinit


@ranks(
    2,
    *[("O0", F32, False), ("O1", F16, True), ("O2", BF16, True)],
    long=[("O1", BF16, False), ("O2", F16, False), ("O3", F16, True), ("O3", BF16, False)],
)
def test_fsdp_equals_one_process_with_the_large_batch(level: str, dtype: torch.dtype, warm: bool) -> None:
    batches = CASE.batches(5)
    alone = CASE.build()
    optimizer = sgd_of(alone)
    mpinit.initialize(alone, optimizer, **level_arguments(level, dtype), **by_itself())
    train(alone, optimizer, batches, CASE.loss)
    expected = whole(alone.state_dict())
    mpinit.undo(alone)
    model = sharded()
    optimizer = sgd_of(model)
    before = {id(parameter) for parameter in model.parameters()}
    if warm:
        x, y = mine(batches[0])
        CASE.loss(model(x), y).backward()
        model.zero_grad()
        model(x)  # leaves the gathered weights in place
    mpinit.initialize(model, optimizer, **level_arguments(level, dtype))
    weights = dtype if level == "O3" else F32
    assert {parameter.dtype for parameter in model.parameters()} == {weights}
    assert all(isinstance(parameter, DTensor) for parameter in mpinit.master_params(optimizer))
    train(model, optimizer, [mine(batch) for batch in batches], CASE.loss)
    state = whole(model.state_dict())
    assert all(value.dtype is F32 for value in state.values())
    assert_one(state)
    assert_close(state, expected, TOLERANCE[dtype])
    mpinit.undo(model)
    undone = whole(model.state_dict())
    assert {parameter.dtype for parameter in model.parameters()} == {F32}
    assert all(torch.equal(undone[name], state[name]) for name in state), "the masters' bits"
    assert {id(parameter) for parameter in model.parameters()} == before
    x, y = mine(batches[0])
    CASE.loss(model(x), y).backward()
    optimizer.step()


@ranks(2, ("O2", BF16), long=[("O2", F16), ("O1", BF16)])
def test_fsdp_skips_on_all_ranks_when_one_shard_overflows(level: str, dtype: torch.dtype) -> None:
    """In bfloat16 the scale is 1, and gradients are looked at when the step begins."""
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, **level_arguments(level, dtype))
    x, y = mine(CASE.batches(1)[0])
    before = whole(model.state_dict())
    with mpinit.scale_loss(CASE.loss(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
        if dist.get_rank() == 1:
            next(iter(model.layer.parameters())).grad.to_local().fill_(float("nan"))
    optimizer.step()
    assert mpinit.step_was_skipped(optimizer)
    assert_one(mpinit.loss_scale(optimizer))
    after = whole(model.state_dict())
    assert all(torch.equal(after[name], before[name]) for name in before)


@ranks(2)
def test_a_group_of_two_dtypes_is_refused_and_batchnorm_by_itself_works() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    model = fully_shard(network(), mesh=mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(ValueError, "fully_shard", "keep_batchnorm_fp32"):
        mpinit.initialize(model, optimizer, "O2", verbosity=0)
    assert {parameter.dtype for parameter in model.parameters()} == {F32}
    model = network()
    fully_shard(model[1], mesh=mesh(2))
    fully_shard(model, mesh=mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O2", verbosity=0, loss_scale=8.0)
    x = torch.randn(4, 4)
    inside: dict[int, torch.dtype] = {}
    for index in range(2):
        model[index].register_forward_pre_hook(lambda m, _, i=index: inside.update({i: m.weight.dtype}))
    for _ in range(2):
        with mpinit.scale_loss(model(x).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert {parameter.dtype for parameter in model.parameters()} == {F32}
    assert (inside[0], inside[1]) == (F16, F32)


@ranks(2)
def test_what_is_made_before_sharding_is_refused() -> None:
    model = CASE.build()
    optimizer = sgd_of(model)
    fully_shard(model, mesh=mesh(2))
    for level in ("O1", "O2"):
        with refused(ValueError, "fully_shard (or parallelize_module) has put a shard"):
            mpinit.initialize(model, optimizer, level, verbosity=0)
    for level, more in (("O1", {}), ("O2", {}), ("O5", {}), ("O2", {"master_weights": "model"})):
        model = CASE.build()
        optimizer = sgd_of(model)
        mpinit.initialize(model, optimizer, level, verbosity=0, init_loss_scale=1024.0, **more)
        fully_shard(model.layer, mesh=mesh(2))
        with refused(RuntimeError, "layer.", "fully_shard"):
            train(model, optimizer, [mine(batch) for batch in CASE.batches(1)], CASE.loss)
        mpinit.undo(model)
    model = CASE.build()
    mpinit.initialize(model, opt_level="O5", await_optimizers=True, verbosity=0)
    fully_shard(model, mesh=mesh(2))
    with refused(RuntimeError, "fully_shard"):
        mpinit.add_optimizers(sgd_of(model))


@ranks(2, ("O2",), ("O5",))
def test_shards_are_the_masters(level: str) -> None:
    """Bit for bit what a loop by hand comes to on FSDP2's own policy; writes to shards stay."""
    dtype = torch.float16 if level == "O2" else torch.bfloat16
    batches = [mine(batch) for batch in CASE.batches(4)]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = sharded(mp_policy=policy)
    optimizer = sgd_of(model)
    for x, y in batches:
        optimizer.zero_grad()
        scale = 1024.0 if level == "O2" else 1.0
        (CASE.loss(model(x).float(), y) * scale).backward()
        for parameter in model.parameters():
            parameter.grad.div_(scale)
        optimizer.step()
        write(model)
    expected = whole(model.state_dict())
    model = sharded()
    optimizer = sgd_of(model)
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
    assert_same(whole(model.state_dict()), expected)
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


@ranks(2)
def test_a_policy_that_contradicts_the_level_is_refused() -> None:
    for level, other in (("O2", torch.bfloat16), ("O5", torch.float16), ("O3", torch.bfloat16)):
        model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=other))
        with refused(ValueError, "MixedPrecisionPolicy", str(other)):
            mpinit.initialize(model, sgd_of(model), level, verbosity=0)
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = sgd_of(model)
    mpinit.initialize(model, optimizer, "O5", verbosity=0)
    train(model, optimizer, [mine(batch) for batch in CASE.batches(1)], CASE.loss)


@ranks(2, ("O2",), long=[("O1",)])
def test_undo_after_a_failed_forward(level: str) -> None:
    model = sharded()
    optimizer = sgd_of(model)
    mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[level])
    before = whole(model.state_dict())

    def fail(*_: Any) -> None:
        raise KeyError("in the forward")

    handle = model.layer.linear2.register_forward_hook(fail)
    batch = mine(CASE.batches(1)[0])
    with refused(KeyError):
        backward(model, optimizer, batch)
    handle.remove()
    mpinit.undo(model)
    assert_same(whole(model.state_dict()), before)
    CASE.loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


@ranks(2, ("O2",), ("O5",))
def test_what_is_trained_is_what_is_served(level: str) -> None:
    """Every rank's forward is, to the bit, that of a plain 16-bit model loaded from the exported checkpoint."""
    model = sharded()
    optimizer = sgd_of(model)
    mpinit.initialize(model, optimizer, level, verbosity=0)
    batches = CASE.batches(4)
    train(model, optimizer, [mine(batch) for batch in batches[:3]], CASE.loss)
    served = CASE.build()
    served.load_state_dict(whole(model.state_dict()))
    served = served.to(F16 if level == "O2" else BF16)
    found = mpinit.fidelity(model, mine(batches[3])[0], served=served)
    assert found, str(found)
