"""Four ranks that do not do the same: no batch at all, a checkpoint of one's own, averages; see distributed_matrix."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from distributed_by_hand import full, sgd
from distributed_engines import LEVELS, batches, ddp, fsdp, loss_of, text
from distributed_replicas import refused
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

import mpinit

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # they script what torch itself deprecates
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

DYNAMIC = {"loss_scale": "dynamic", "init_loss_scale": 1024.0, "verbosity": 0}


def keywords(level: str) -> dict[str, Any]:
    return ({"opt_level": "O1"} if level == "O1" else LEVELS[level][0]) | DYNAMIC


def parts(count: int) -> list[tuple[Tensor, Tensor]]:
    rank = dist.get_rank()
    return [(x.chunk(4)[rank], y.chunk(4)[rank]) for x, y in batches(count)]


def backward(model: Any, optimizer: Any, batch: tuple[Tensor, Tensor], factor: float = 1.0) -> None:
    x, y = batch
    with mpinit.scale_loss(loss_of(model(x), y, len(x)) * factor, optimizer) as scaled_loss:
        scaled_loss.backward()


def everything(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """A rank's masters and scale, in one list."""
    return [*model.state_dict().values(), torch.tensor([mpinit.loss_scale(optimizer)])]


def assert_one(model: nn.Module, optimizer: Any) -> None:
    flat = torch.cat([tensor.detach().flatten().float() for tensor in everything(model, optimizer)])
    gathered = [torch.empty_like(flat) for _ in range(4)]
    dist.all_gather(gathered, flat)
    assert all(torch.equal(gathered[0], other) for other in gathered[1:])


def network(seed: int) -> nn.Module:
    """A model with numbers of its own."""
    torch.manual_seed(seed)
    model = text()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.01)
    return model


def a_rank_without_a_batch_ends_with_the_others_masters(level: str) -> None:
    """Neither does it keep anybody waiting, nor is it left behind when all train on, with scales that moved since."""
    rank = dist.get_rank()
    model = network(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **keywords(level))
    wrapped = DistributedDataParallel(model)
    assert_one(model, optimizer)
    with wrapped.join():
        for index, batch in enumerate(parts(4)[: (4, 3, 1, 0)[rank]]):
            optimizer.zero_grad()
            # When two ranks have nothing any more.
            backward(wrapped, optimizer, batch, float("inf") if index == 2 and rank == 1 else 1.0)
            optimizer.step()
    assert mpinit.loss_scale(optimizer) == (1024.0 if level == "O0" else 512.0)
    assert_one(model, optimizer)
    for batch in parts(3):
        optimizer.zero_grad()
        backward(wrapped, optimizer, batch)
        optimizer.step()
        assert_one(model, optimizer)


def what_one_rank_has_loaded_reaches_all(level: str) -> None:
    """Masters and scale, when the model is wrapped, and by broadcast_masters afterwards."""
    model = network(seed=0)
    optimizer = sgd(model.parameters())
    mpinit.initialize(model, optimizer, **keywords(level))
    state = network(seed=7).state_dict()
    if dist.get_rank() == 0:
        model.load_state_dict(state)
        mpinit.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 5}}, optimizer)
    wrapped = DistributedDataParallel(model)
    assert mpinit.loss_scale(optimizer) == 64.0
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    if dist.get_rank() == 2:
        mpinit.load_state_dict({"loss_scaler0": {"loss_scale": 32.0, "unskipped": 5}}, optimizer)
    mpinit.broadcast_masters(optimizer, src=2)
    for batch in parts(2):
        optimizer.zero_grad()
        backward(wrapped, optimizer, batch)
        optimizer.step()
        assert_one(model, optimizer)
    assert mpinit.state_dict(optimizer)["loss_scaler0"]["unskipped"] == 7


def averages_of_masters_are_one(level: str) -> None:
    """Local SGD: every rank steps by itself, then all have the mean of the masters."""
    model = network(seed=0)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, inner, **keywords(level))
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=1, warmup_steps=0))
    if level == "split":
        backward(model, inner, parts(1)[0])
        optimizer.step()
        with refused(RuntimeError, "hold no numbers between steps", "master_weights=True"):
            model(parts(1)[0][0])
        return
    for batch in parts(3):
        optimizer.zero_grad()
        backward(model, inner, batch)
        gradients = [parameter.grad.float().clone() for parameter in mpinit.master_params(inner)]
        optimizer.step()
        for master, gradient in zip(masters, gradients, strict=True):
            master.add_(gradient, alpha=-0.1)
        flat = torch.cat([master.flatten() for master in masters]) / 4
        dist.all_reduce(flat)
        parts_of_it = torch.split(flat, [master.numel() for master in masters])
        masters = [part.view_as(master).clone() for part, master in zip(parts_of_it, masters, strict=True)]
        assert_one(model, inner)
    for (name, ours), master in zip(model.state_dict().items(), masters, strict=True):
        torch.testing.assert_close(ours, master, msg=lambda text, name=name: f"{name}: {text}")


def zero_redundancy_without_masters(level: str) -> None:
    """Its numbers are those of the optimizer inside it; where there would be masters it is refused."""
    states = []
    for sharded in (False, True):
        model = network(seed=0)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        if sharded:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
            for refuses in ("O2", "O5", "split"):
                with refused(ValueError, "ZeroRedundancyOptimizer", "fully_shard", 'master_weights="model"'):
                    mpinit.initialize(model, optimizer, **LEVELS[refuses][0], verbosity=0)
        mpinit.initialize(model, optimizer, **keywords(level))
        wrapped = ddp()(model, None)
        for index, batch in enumerate(parts(4)):
            optimizer.zero_grad()
            backward(wrapped, optimizer, batch, float("inf") if index == 1 and dist.get_rank() == 2 else 1.0)
            optimizer.step()
            assert mpinit.step_was_skipped(optimizer) == (index == 1)
        assert_one(model, optimizer)
        states.append(model.state_dict())
        mpinit.undo(model)
    assert all(map(torch.equal, states[0].values(), states[1].values()))


def memory_after_initialize() -> None:
    """A model of the meta device gets its memory first; FSDP2's parameters stay those that they are."""
    for level in ("O1", "O2", "split", "model"):
        with torch.device("meta"):
            model = text()
        optimizer = sgd(model.parameters())
        mpinit.initialize(model, optimizer, **keywords(level))
        model.to_empty(device="cpu")
        model.load_state_dict(network(seed=0).state_dict())
        with refused(RuntimeError, "meta device", "to_empty", "mpinit.initialize last"):
            backward(DistributedDataParallel(model), optimizer, parts(1)[0])
        mpinit.undo(model)
        with refused(ValueError, "meta device", "make the optimizer"):
            mpinit.initialize(model, optimizer, **keywords(level))
    with torch.device("meta"):
        model = fsdp(4)(text(), None)
    optimizer = sgd(model.parameters())
    mpinit.initialize(model, optimizer, **keywords("O2"))
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, network(seed=0).state_dict(), options=options)
    before = full(model.state_dict())
    backward(model, optimizer, parts(1)[0])
    optimizer.step()
    after = full(model.state_dict())
    assert not any(torch.equal(before[name], after[name]) for name in after)
