"""Checks for two processes of replicas that are one model; entered by distributed_worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from models import CASES as MODELS
from models import train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpinit

CASE = MODELS["transformer"]
LEVELS: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1", "init_loss_scale": 1024.0},
    "O2": {"opt_level": "O2", "init_loss_scale": 1024.0},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
}
MASTERS = [("O2",), ("O5",), ("split",)]
Pair = tuple[nn.Module, torch.optim.Optimizer]


def build(level: str, seed: int | None = None) -> Pair:
    if seed is not None:
        torch.manual_seed(seed)
    model = CASE.build()
    if seed is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[level])
    return model, optimizer


def mine(batches: list[tuple[Tensor, Tensor]]) -> list[Any]:
    return [tuple(part.chunk(2)[dist.get_rank()] for part in batch) for batch in batches]


def state_of(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def on_all_ranks(value: Any) -> list[Any]:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, value)
    return gathered


def are_one(model: nn.Module) -> bool:
    first, second = on_all_ranks(state_of(model))
    return all(map(torch.equal, first, second))


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, (missing, str(error))
    else:
        raise AssertionError(f"not refused: {words}")


# -- one model --------------------------------------------------------------------------------------------------------


def different_seeds_train_the_first_ranks_masters(level: str, compiled: bool = False) -> None:
    batches = mine(CASE.batches(5))
    model, optimizer = build(level, seed=0)
    train(DistributedDataParallel(model), optimizer, batches, CASE.loss)
    expected = state_of(model)
    mpinit.undo(model)
    model, optimizer = build(level, seed=dist.get_rank())
    wrapped: Any = DistributedDataParallel(model)
    train(torch.compile(wrapped, backend="eager") if compiled else wrapped, optimizer, batches, CASE.loss)
    assert are_one(model)
    assert all(map(torch.equal, state_of(model), expected)), "rank 0's numbers, to the bit"


def a_wrapped_part_has_the_first_ranks_masters() -> None:
    model, optimizer = build("O5", seed=dist.get_rank())
    model.layer = DistributedDataParallel(model.layer)
    with mpinit.scale_loss(CASE.loss(model(mine(CASE.batches(1))[0][0]), mine(CASE.batches(1))[0][1]), optimizer) as s:
        s.backward()
    optimizer.step()
    assert are_one(model.layer.module)


def join_with_uneven_inputs_ends_with_one_models_masters(level: str) -> None:
    model, optimizer = build(level, seed=0)
    wrapped = DistributedDataParallel(model)
    batches = mine(CASE.batches(6))[: 3 + 2 * dist.get_rank()]
    with wrapped.join():
        train(wrapped, optimizer, batches, CASE.loss)
    masters = [master.detach().clone() for master in mpinit.master_params(optimizer)]
    assert are_one(model)
    first, second = on_all_ranks(masters)
    assert all(map(torch.equal, first, second))
    mpinit.undo(model)
    assert "_sync_final_model" not in vars(wrapped)


def a_checkpoint_of_one_rank_reaches_all(level: str) -> None:
    model, optimizer = build(level, seed=0)
    wrapped = DistributedDataParallel(model)
    batches = mine(CASE.batches(3))
    train(wrapped, optimizer, batches, CASE.loss)
    state = {name: value + 1e-4 * torch.randn_like(value) for name, value in model.state_dict().items()}
    if dist.get_rank() == 1:
        model.load_state_dict(state)
    mpinit.broadcast_masters(optimizer, src=1)
    assert are_one(model)
    if dist.get_rank() == 1:
        assert all(map(torch.equal, state_of(model), state.values())), "the sender's numbers stay"
    train(wrapped, optimizer, batches, CASE.loss)
    assert are_one(model)


def broadcasting_refuses_what_it_cannot_send() -> None:
    model, optimizer = build("O5", seed=0)
    with refused(ValueError, "src=7", "[0, 1]"):
        mpinit.broadcast_masters(optimizer, src=7)
    with refused(TypeError, "ProcessGroup"):
        mpinit.broadcast_masters(optimizer, group="world")
    mpinit.undo(model)
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["params"].pop()
    mpinit.initialize(model, optimizer, verbosity=0, opt_level="O5")
    with refused(RuntimeError, "different parameters"):
        mpinit.broadcast_masters(optimizer)
    mpinit.undo(model)
    model = fully_shard(CASE.build(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", verbosity=0)
    with refused(ValueError, "sharded", "broadcast_from_rank0"):
        mpinit.broadcast_masters(optimizer)


# -- gradients that would not be reduced ------------------------------------------------------------------------------


def wrappers_are_found_wherever_they_are() -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    inside = CASE.build()
    wrapped = DistributedDataParallel(inside)
    with refused(ValueError, "DistributedDataParallel around the model", "del"):
        mpinit.initialize(inside, optimizer_of(inside), "O2", verbosity=0)
    with refused(ValueError, "DistributedDataParallel"):
        mpinit.initialize(torch.compile(wrapped, backend="eager"), optimizer_of(inside), "O5", verbosity=0)
    with refused(ValueError, "torch.compile", "DistributedDataParallel"):
        mpinit.initialize(torch.compile(wrapped, backend="eager"), optimizer_of(inside), "O1", verbosity=0)
    around = nn.Sequential(wrapped)
    with refused(ValueError, "'0' is wrapped"):
        mpinit.initialize(around, optimizer_of(around), "O5", verbosity=0)
    assert {parameter.dtype for parameter in inside.parameters()} == {torch.float32}
    del wrapped, around
    mpinit.initialize(inside, optimizer_of(inside), "O5", verbosity=0)


def fsdp1_is_sent_to_fsdp2() -> None:
    model = FullyShardedDataParallel(CASE.build(), device_id=torch.device("cpu"))
    for given in (model, nn.Sequential(model)):
        with refused(ValueError, "FSDP1", "fully_shard(model)"):
            mpinit.initialize(given, torch.optim.SGD(model.parameters(), lr=0.1), "O1", verbosity=0)


def training_on_after_undo_asks_for_another_wrapper(compiled: bool) -> None:
    batches = mine(CASE.batches(4))
    model, optimizer = build("O5", seed=0)
    wrapped: Any = DistributedDataParallel(model)
    runs: Callable[..., Tensor] = torch.compile(wrapped, backend="eager") if compiled else wrapped
    train(runs, optimizer, batches[:2], CASE.loss)
    mpinit.undo(model)
    with torch.no_grad():
        runs(batches[0][0])
    with refused(RuntimeError, "Wrap the model again"):
        runs(batches[0][0])
    again = DistributedDataParallel(model)
    CASE.loss(again(batches[2][0]), batches[2][1]).backward()
    first, second = on_all_ranks([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, first, second))
    del again
    mpinit.initialize(model, optimizer, "O5", verbosity=0)
    train(DistributedDataParallel(model), optimizer, batches[2:], CASE.loss)
    assert are_one(model)


def undo_of_float32_weights_leaves_the_wrapper_be() -> None:
    batches = mine(CASE.batches(2))
    model, optimizer = build("O1", seed=0)
    wrapped = DistributedDataParallel(model)
    train(wrapped, optimizer, batches, CASE.loss)
    mpinit.undo(model)
    CASE.loss(wrapped(batches[0][0]), batches[0][1]).backward()
    optimizer.step()
    assert are_one(model)
