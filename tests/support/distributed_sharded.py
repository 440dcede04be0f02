"""Checks for two processes of models that FSDP2 has sharded; entered by distributed_worker."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from distributed_pairs import CASE, F16, F32, TOLERANCE, alone, assert_close, assert_ranks_agree, full, mine
from models import level_arguments, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mpinit


def sharded() -> nn.Module:
    model = CASE.build()
    fully_shard(model.layer, mesh=MESH())
    return fully_shard(model, mesh=MESH())


@functools.cache
def MESH() -> Any:
    return init_device_mesh("cpu", (2,))


def casts_in_forwards_of_a_sharded_model_are_refused() -> None:
    model = sharded()
    try:
        mpinit.initialize(model, opt_level="O5", master_weights="model", verbosity=0)
    except ValueError as error:
        assert "fully_shard" in str(error) and "master_weights=True" in str(error), error
    else:
        raise AssertionError("casts in forwards of DTensors were accepted")


def fsdp_equals_one_process_with_the_large_batch(level: str, dtype: torch.dtype, warm: bool) -> None:
    batches = CASE.batches(5)
    expected = alone(level, dtype, batches)
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
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
    state = full(model.state_dict())
    assert all(value.dtype is F32 for value in state.values())
    assert_ranks_agree(state)
    assert_close(state, expected, TOLERANCE[dtype])
    mpinit.undo(model)
    undone = full(model.state_dict())
    assert {parameter.dtype for parameter in model.parameters()} == {F32}
    assert all(torch.equal(undone[name], state[name]) for name in state), "the masters' bits"
    assert {id(parameter) for parameter in model.parameters()} == before
    x, y = mine(batches[0])
    CASE.loss(model(x), y).backward()
    optimizer.step()


def fsdp_skips_on_all_ranks_when_one_shard_overflows(level: str) -> None:
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, **level_arguments(level, F16))
    x, y = mine(CASE.batches(1)[0])
    before = full(model.state_dict())
    with mpinit.scale_loss(CASE.loss(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
        if dist.get_rank() == 1:
            next(iter(model.layer.parameters())).grad.to_local().fill_(float("nan"))
    optimizer.step()
    assert mpinit.step_was_skipped(optimizer)
    assert_ranks_agree(mpinit.loss_scale(optimizer))
    after = full(model.state_dict())
    assert all(torch.equal(after[name], before[name]) for name in before)


def fsdp_loads_float32_and_clips(dtype: torch.dtype) -> None:
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, **level_arguments("O2", dtype))
    noise = {name: value.detach() * 1.37 + 0.1 for name, value in model.state_dict().items()}
    expected = full(noise)
    model.load_state_dict(noise)
    got = full(model.state_dict())
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    x, y = mine(CASE.batches(1)[0])
    with mpinit.scale_loss(CASE.loss(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    mpinit.clip_grad_norm_(optimizer, 0.1)
    norms = [p.grad.full_tensor().norm() for p in mpinit.master_params(optimizer) if p.grad is not None]
    assert torch.stack(norms).norm() <= 0.1001
    optimizer.step()


def a_group_of_two_dtypes_is_refused_and_batchnorm_by_itself_works() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    model = fully_shard(network(), mesh=MESH())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        mpinit.initialize(model, optimizer, "O2", verbosity=0)
    except ValueError as error:
        assert "fully_shard" in str(error) and "keep_batchnorm_fp32" in str(error), error
    else:
        raise AssertionError("a group in two dtypes was accepted")
    assert {parameter.dtype for parameter in model.parameters()} == {F32}
    model = network()
    fully_shard(model[1], mesh=MESH())
    fully_shard(model, mesh=MESH())
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
