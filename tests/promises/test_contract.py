"""The rules of the contract, by number: what a user may rely on, what is refused with its way out, what is not seen."""

import datetime
from typing import Any

import engines
import torch
import torch.distributed as dist
from processes import ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpinit

# -- Rule 10: ranks ----------------------------------------------------------------------------------------------------


def two_layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def of_rank(index: int) -> Tensor:
    """A batch of this rank's own."""
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def pass_of(model: Any, optimizer: Any, x: Tensor, factor: float = 1.0, **more: Any) -> None:
    with mpinit.scale_loss(model(x).square().mean() * factor, optimizer, **more) as scaled_loss:
        scaled_loss.backward()


@ranks(2, ("ddp",), ("fsdp",), ("group",))
def test_overflow_on_one_rank_skips_on_all(engine: str) -> None:
    model: Any = two_layers()
    if engine == "fsdp":
        fully_shard(model, mesh=engines.mesh(2))
    optimizer = sgd(model)
    group = {"process_group": dist.group.WORLD} if engine == "group" else {}
    mpinit.initialize(model, optimizer, "O2", loss_scale=mpinit.DynamicLossScale(init=1024.0), **group)
    runs = DistributedDataParallel(model) if engine == "ddp" else model
    for index in range(3):
        optimizer.zero_grad()
        bad = index == 1 and dist.get_rank() == 1
        pass_of(runs, optimizer, of_rank(index), float("inf") if bad else 1.0)
        for parameter in model.parameters() if engine == "group" else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        assert mpinit.step_was_skipped(optimizer) == (index == 1)
        engines.assert_one((mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer)))
    assert mpinit.loss_scale(optimizer) == 512.0
    engines.assert_one(list(engines.whole(model.state_dict()).values()))


@ranks(2)
def test_rank_that_leaves_out_a_step_lets_the_others_wait_until_the_timeout() -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = two_layers()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O2", process_group=group)
    pass_of(model, optimizer, of_rank(0))
    dist.barrier()
    if dist.get_rank() == 0:
        with engines.refused(RuntimeError, "imed out"):
            optimizer.step()
    dist.barrier()


@ranks(2, ("O2", True), ("O5", "split"))
def test_wrapping_gives_all_ranks_the_masters_of_the_first(level: str, masters: Any) -> None:
    model = two_layers(seed=dist.get_rank())
    first = two_layers(seed=0).state_dict()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, level, master_weights=masters)
    DistributedDataParallel(model)
    assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())


@ranks(2)
def test_older_wrapper_is_refused_at_the_first_step() -> None:
    model = two_layers()
    runs = DistributedDataParallel(model)
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O5")
    pass_of(runs, optimizer, of_rank(0))
    before = [value.clone() for value in model.state_dict().values()]
    with engines.refused(RuntimeError, "made before mpinit.initialize", "Call mpinit.initialize first"):
        optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), before))


@ranks(2)
def test_models_of_unknown_processes_need_a_process_group() -> None:
    model = two_layers()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O2")
    pass_of(model, optimizer, of_rank(0))
    with engines.refused(RuntimeError, "process_group=torch.distributed.group.WORLD", "new_subgroups(group_size=1)"):
        optimizer.step()


@ranks(2)
def test_local_steps_need_a_process_group() -> None:
    """After passes in ``no_sync()`` only, at a dynamic scale. Passes that are averaged later need nothing."""
    for given in ({}, {"process_group": dist.group.WORLD}):
        model = two_layers()
        optimizer = sgd(model)
        mpinit.initialize(model, optimizer, "O2", loss_scale=mpinit.DynamicLossScale(init=1024.0), **given)
        runs = DistributedDataParallel(model)
        pass_of(runs, optimizer, of_rank(0))
        optimizer.step()
        for index in range(2):
            optimizer.zero_grad()
            with runs.no_sync():
                pass_of(runs, optimizer, of_rank(1), float("inf") if dist.get_rank() == index == 1 else 1.0)
            if not given:
                with engines.refused(RuntimeError, "no_sync()", "process_group=torch.distributed.group.WORLD"):
                    optimizer.step()
                pass_of(runs, optimizer, of_rank(2))
            optimizer.step()
            engines.assert_one((mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer)))
        assert mpinit.step_counts(optimizer) == (2, 1)


@ranks(2)
def test_float32_shards_are_the_masters() -> None:
    """Equal to float32 weights by hand whose forward is in bfloat16; gradients are averaged in float32."""
    model: Any = fully_shard(two_layers(), mesh=engines.mesh(2))
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O5")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    by_hand = two_layers()
    stepped = sgd(by_hand)
    for index in range(3):
        optimizer.zero_grad()
        pass_of(model, optimizer, of_rank(index))
        optimizer.step()
        narrow = two_layers().bfloat16()
        narrow.load_state_dict(by_hand.state_dict())
        narrow(of_rank(index).bfloat16()).float().square().mean().backward()
        for weight, master in zip(narrow.parameters(), by_hand.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float() / 2
            dist.all_reduce(master.grad)
        stepped.step()
    for name, value in engines.whole(model.state_dict()).items():
        assert torch.equal(value, by_hand.state_dict()[name]), name


@ranks(2)
def test_gradients_that_fsdp_keeps_are_refused_under_a_loss_scale() -> None:
    model: Any = fully_shard(two_layers(), mesh=engines.mesh(2))
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O2")
    model.set_requires_gradient_sync(False)
    with engines.refused(RuntimeError, "FSDP2 keeps gradients", "opt_level='O5'", "loss_scale=1.0"):
        pass_of(model, optimizer, of_rank(0))


@ranks(2)
def test_scale_that_one_rank_loads_is_not_seen() -> None:
    """Load it on every rank, or before the model is wrapped."""
    model = two_layers()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O2")
    if dist.get_rank() == 0:
        mpinit.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}}, optimizer)
    runs = DistributedDataParallel(model)
    assert mpinit.loss_scale(optimizer) == 64.0
    if dist.get_rank() == 1:
        mpinit.load_state_dict({"loss_scaler0": {"loss_scale": 32.0, "unskipped": 0}}, optimizer)
    pass_of(runs, optimizer, of_rank(0))
    optimizer.step()
    assert mpinit.loss_scale(optimizer) == (64.0, 32.0)[dist.get_rank()]
