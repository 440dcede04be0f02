"""Checks for two processes of encoded states of parameters that FSDP2 has sharded; entered by distributed_launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_split import adam, assert_same, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import mpinit
from mpinit.distributed.sharding import shard
from mpinit.masters.codecs.encoded import encoded_part

SPLIT: dict[str, Any] = {"opt_level": "O5", "master_weights": "split"}
FULL: dict[str, Any] = {"opt_level": "O5"}
PLAIN: dict[str, Any] = {"opt_level": "O0"}


def network() -> nn.Sequential:
    """Two ranks get whole blocks of the first weight; of the rest they get too little to be encoded."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 80), nn.Tanh(), nn.Linear(80, 3))


def sharded(encoding: str, kind: dict[str, Any]) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = fully_shard(network(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = adam(model.parameters())
    mpinit.initialize(model, optimizer, optimizer_state=encoding, split_bucket_bytes=40_000, verbosity=0, **kind)
    return model, optimizer


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
    x, y = torch.randn(8, 128, generator=generator), torch.randint(3, (8,), generator=generator)
    optimizer.zero_grad()
    with mpinit.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This process's parts, in float32."""
    found = optimizer.state_dict()["state"]
    return [shard(value) for state in found.values() for value in state.values()]


def shards_are_encoded_as_parameters_of_their_own_are(encoding: str, kind: dict[str, Any]) -> None:
    model, optimizer = sharded(encoding, kind)
    alone = nn.ParameterList(part.detach().chunk(2)[dist.get_rank()].clone() for part in network().parameters())
    stepped = adam(alone.parameters())
    mpinit.initialize(alone, stepped, optimizer_state=encoding, split_bucket_bytes=40_000, verbosity=0, **kind)
    for index in range(4):
        backward(model, optimizer, index)
        for weight, mine in zip(model.parameters(), alone, strict=True):
            assert isinstance(weight.grad, DTensor)
            mine.grad = shard(weight.grad).clone()
        optimizer.step()
        stepped.step()
    codes = [encoded_part(value) for state in optimizer.state.values() for value in state.values()]
    assert sum(code is not None for code in codes) == 2
    assert all(type(part) is Tensor for part in states(optimizer))
    # FSDP2 holds full masters' weights itself, in float32, and gathers them in 16 bit.
    for weight, mine in zip(mpinit.master_params(optimizer), mpinit.master_params(stepped), strict=True):
        assert torch.equal(shard(weight), mine)
    for part, mine in zip(states(optimizer), states(stepped), strict=True):
        assert torch.equal(part, mine)
    before = states(optimizer)
    mpinit.undo(model)
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(encoded_part(value) is None for value in after)
    assert {type(value) for value in after if value.dim()} == {DTensor}
    assert all(torch.equal(shard(value), part) for value, part in zip(after, before, strict=True))


def states_go_through_float32(encoding: str) -> None:
    """Gathered, loaded by one process, and sharded again: blocks fall alike, and so do bits."""
    model, optimizer = sharded(encoding, SPLIT)
    for index in range(3):
        backward(model, optimizer, index)
        optimizer.step()
    # Not the tensors themselves: torch would load them without a copy.
    weights, found = tree_map_only(Tensor, torch.clone, get_state_dict(model, optimizer))
    saved = whole({"model": weights, "optimizer": found["state"]})
    assert {value.dtype for value in saved.values()} == {torch.float32}
    alone = network()
    stepped = adam(alone.parameters())
    mpinit.initialize(alone, stepped, optimizer_state=encoding, verbosity=0, **SPLIT)
    _, gathered = get_state_dict(alone, stepped)
    gathered["state"] = nested(saved)
    set_model_state_dict(alone, {name: saved[f"model.{name}"] for name in weights})
    set_optimizer_state_dict(alone, stepped, gathered)
    again, other = sharded(encoding, SPLIT)
    set_model_state_dict(again, weights)
    set_optimizer_state_dict(again, other, found)
    for one, two in ((alone, stepped), (again, other)):
        weights_of, states_of = get_state_dict(one, two)
        assert_same(whole({"model": weights_of, "optimizer": states_of["state"]}), saved)
    for two in (stepped, other):
        codes = [encoded_part(value) for state in two.state.values() for value in state.values()]
        assert sum(code is not None for code in codes) == 2
    # Training goes on, and to the same numbers.
    for one, two in ((model, optimizer), (again, other)):
        backward(one, two, 3)
        two.step()
    assert_same(whole(again.state_dict()), whole(model.state_dict()))


def nested(saved: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's part, by parameter."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in saved.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition(".")
            found.setdefault(parameter, {})[key] = value
    return found


CHECKS: dict[str, Callable[[], None]] = {
    "encoded states of split shards": partial(shards_are_encoded_as_parameters_of_their_own_are, "int8", SPLIT),
    "encoded states of shards with full masters": partial(
        shards_are_encoded_as_parameters_of_their_own_are, "bfloat16", FULL
    ),
    "encoded states of float32 shards": partial(shards_are_encoded_as_parameters_of_their_own_are, "int8", PLAIN),
    "encoded states of shards go through float32": partial(states_go_through_float32, "int8"),
}
