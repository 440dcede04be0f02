"""Checks for four processes of split masters that FSDP2 has sharded; entered by distributed_launch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import mpinit
from mpinit.distributed.sharding import shard

BF16, F32 = torch.bfloat16, torch.float32
Optimizers = Callable[[Any], torch.optim.Optimizer]


def network() -> nn.Sequential:
    """Sizes that four ranks cannot share evenly: the last has nothing of some."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))


def sharded(mesh: Any, model: nn.Sequential, **options: Any) -> nn.Sequential:
    fully_shard(model[0], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(index: int) -> tuple[Tensor, Tensor]:
    """This rank's."""
    generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, indices: range) -> None:
    for index in indices:
        x, y = batch(index)
        optimizer.zero_grad()
        with mpinit.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def split(mesh: Any, make: Optimizers, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = sharded(mesh, network(), **options)
    optimizer = make(model.parameters())
    mpinit.initialize(model, optimizer, "O5", master_weights="split", verbosity=0)
    return model, optimizer


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def grid() -> Any:
    """Shards within pairs of ranks, and copies over pairs."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def by_hand(mesh: Any, make: Optimizers, steps: int, **options: Any) -> dict[str, Tensor]:
    """16-bit parameters given to FSDP2, and float32 ones, sharded alike, that an optimizer steps in their places."""
    model = sharded(mesh, network().to(BF16), **options)
    exact = sharded(mesh, network(), **options)
    optimizer = make(exact.parameters())
    for index in range(steps):
        x, y = batch(index)
        F.cross_entropy(model(x.to(BF16)).float(), y).backward()
        for weight, master in zip(model.parameters(), exact.parameters(), strict=True):
            assert isinstance(weight.grad, DTensor)
            master.grad, weight.grad = weight.grad.to(F32), None
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(model.parameters(), exact.parameters(), strict=True):
                bits = shard(master).view(torch.int32)
                shard(weight).view(torch.int16).copy_((bits + 0x8000) >> 16)
    return whole(exact.state_dict())


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """A state's tensors, put together from all ranks."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": inner for name, inner in whole(value).items()}
        elif isinstance(value, Tensor):
            found[key] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys(), (one.keys(), other.keys())
    for name in one:
        assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), name


def shards_step_as_float32_ones_do(kind: str) -> None:
    """Masters to the bit, in the reduction that the policy asks for, and over a mesh of two dimensions."""
    for make, policy in ((adam, None), (sgd, F32)):
        mesh = init_device_mesh("cpu", (4,)) if kind == "one dimension" else grid()
        options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=policy)}
        expected = by_hand(mesh, make, 4, **options)
        model, optimizer = split(mesh, make, **options)
        train(model, optimizer, range(4))
        assert {parameter.dtype for parameter in model.parameters()} == {BF16}
        assert_same(whole(model.state_dict()), expected)
        mpinit.undo(model)
        assert {parameter.dtype for parameter in model.parameters()} == {F32}
        assert_same(whole(model.state_dict()), expected)


def both_sides_of_a_shard_are_one() -> None:
    """What is written to a weight counts; values that come from a state dict keep all bits."""
    model, optimizer = split(init_device_mesh("cpu", (4,)), adam)
    train(model, optimizer, range(2))
    before = whole(model.state_dict())
    with torch.no_grad():
        model[2].bias.mul_(2)  # type: ignore[operator]
    after = whole(model.state_dict())
    assert torch.equal(after["2.bias"], before["2.bias"].to(BF16).to(F32) * 2)
    assert_same(after | {"2.bias": before["2.bias"]}, before)
    noise = {name: value.detach() * 1.37 + 0.1 for name, value in model.state_dict().items()}
    expected = whole(noise)
    model.load_state_dict(noise)
    assert_same(whole(model.state_dict()), expected)
    mpinit.clip_grad_norm_(optimizer, 1.0)
    train(model, optimizer, range(2, 4))
    bytes_held = sum(shard(parameter).nbytes + shard(parameter.grad).nbytes for parameter in model.parameters())
    states = sum(shard(value).nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
    own = sum(shard(parameter).numel() for parameter in model.parameters())
    assert bytes_held == 4 * own and states == 8 * own


def checkpoints_reshard_to_the_bit() -> None:
    """Saved by 2 ranks, loaded and saved by 4, loaded by 1."""
    folders: list[Any] = [tempfile.mkdtemp(), tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, src=0)
    rank = dist.get_rank()
    pairs = grid()["shards"]
    model, optimizer = split(pairs, adam)
    train(model, optimizer, range(3))
    saved = whole_of(model, optimizer)
    if rank < 2:
        save(model, optimizer, folders[0], pairs.get_group())
    dist.barrier()
    mpinit.undo(model)
    model, optimizer = split(init_device_mesh("cpu", (4,)), adam)
    load(model, optimizer, folders[0])
    if rank < 2:
        assert_same(whole_of(model, optimizer), saved)
    else:
        whole_of(model, optimizer)
    train(model, optimizer, range(3, 5))
    saved = whole_of(model, optimizer)
    save(model, optimizer, folders[1], None)
    dist.barrier()
    if rank == 0:
        alone = network()
        stepped = adam(alone.parameters())
        mpinit.initialize(alone, stepped, "O5", master_weights="split", verbosity=0)
        load(alone, stepped, folders[1], no_dist=True)
        assert_same(whole_of(alone, stepped), saved)
        assert {parameter.dtype for parameter in alone.parameters()} == {BF16}


def whole_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    weights, states = get_state_dict(model, optimizer)
    return whole({"model": weights, "optimizer": states["state"]})


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, group: Any) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder, process_group=group)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, **how: Any) -> None:
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=folder, **how)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def gradient_release_is_refused() -> None:
    """Other ranks' gradients come later."""
    for model in (network(), sharded(grid(), network())):
        optimizer = adam(model.parameters())
        try:
            mpinit.initialize(model, optimizer, "O5", gradient_release=True, verbosity=0)
        except ValueError as error:
            assert "fully_shard" in str(error) and "meshes of one or more dimensions" in str(error), error
        else:
            raise AssertionError("gradients that are not yet added up over ranks were stepped")
        assert {parameter.dtype for parameter in model.parameters()} == {F32}


CHECKS: dict[str, Callable[[], None]] = {
    "split shards step as float32 ones do, one dimension": partial(shards_step_as_float32_ones_do, "one dimension"),
    "split shards step as float32 ones do, two dimensions": partial(shards_step_as_float32_ones_do, "two dimensions"),
    "both sides of a split shard are one": both_sides_of_a_shard_are_one,
    "checkpoints of split shards reshard to the bit": checkpoints_reshard_to_the_bit,
    "gradient release is refused": gradient_release_is_refused,
}
