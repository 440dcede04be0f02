"""Ranks that train one model: the same settings are required, and float32 values and loss scales stay the same."""

import contextlib
import copy
import gc
import time
import warnings
from typing import Any
from unittest import mock

import engines
import torch
import torch.distributed as dist
from models import LEVELS, Parts, train
from processes import ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpinit

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own use of TorchScript

SCALED = {"loss_scale": mpinit.DynamicLossScale(init=1024.0)}
INF = float("inf")


MIXED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "scale": ({"loss_scale": 128.0}, {"loss_scale": 64.0}, "loss_scale is 128.0 on rank 0 and 64.0 on rank 1"),
    "kind": ({"loss_scale": "dynamic"}, {"loss_scale": 64.0}, "loss_scale is 'dynamic' on rank 0 and 64.0 on rank 1"),
    "interval": (
        {"loss_scale": mpinit.DynamicLossScale(growth_interval=5)},
        {"loss_scale": mpinit.DynamicLossScale(growth_interval=7)},
        "loss_scale is DynamicLossScale",
    ),
    "level": ({"opt_level": "O2"}, {"opt_level": "O1"}, "opt_level is 'O2' on rank 0 and 'O1' on rank 1"),
    "type": ({"opt_level": "O5"}, {"opt_level": "O2"}, "cast_model_type is torch.bfloat16 on rank 0"),
    "masters": ({"opt_level": "O5"}, {"opt_level": "O5", "master_weights": "split"}, "master_weights is True on rank"),
    "losses": ({"num_losses": 1}, {"num_losses": 2}, "num_losses is 1 on rank 0 and 2 on rank 1"),
}


@ranks(
    2,
    *[("ddp", "scale"), ("fsdp", "level"), ("fsdp", "kind"), ("group", "kind")],
    long=[(engine, case) for engine in ("ddp", "fsdp", "group") for case in MIXED],
)
def test_keywords_that_differ_are_refused_on_all_ranks_at_once(engine: str, case: str) -> None:
    *given, said = MIXED[case]
    asked = {"opt_level": "O2"} | given[dist.get_rank()]
    model = engines.sharded() if engine == "fsdp" else engines.CASE.build()
    optimizer = engines.sgd_of(model)
    group = {"process_group": dist.group.WORLD} if engine == "group" else {}
    start = time.monotonic()
    with engines.refused(ValueError, said, "on every rank"):
        mpinit.initialize(model, optimizer, **asked, **group)
        DistributedDataParallel(model)
    assert time.monotonic() - start < 10
    if engine != "ddp":
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert engines.on_all_ranks("alive") == ["alive"] * 2


@ranks(2, ("ddp",), ("fsdp",), ("group",))
def test_enabled_on_one_rank_only_is_refused_on_all(engine: str) -> None:
    """Where plain DDP or FSDP2 would meet collectives of a comparison. All ranks may disable it."""
    for both in (False, True):
        model = engines.sharded() if engine == "fsdp" else engines.CASE.build()
        optimizer = engines.sgd_of(model)
        group = {"process_group": dist.group.WORLD} if engine == "group" else {}
        enabled = not both and dist.get_rank() == 1
        said = "enabled is False on rank 0 and True on rank 1"
        with contextlib.nullcontext() if both else engines.refused(ValueError, said):
            mpinit.initialize(model, optimizer, "O2", enabled=enabled, **group)
            runs = DistributedDataParallel(model) if engine == "ddp" else model
        assert engines.on_all_ranks("alive") == ["alive"] * 2
    train(runs, optimizer, [engines.mine(engines.CASE.batches(1)[0])], engines.CASE.loss)


@ranks(2)
def test_numbers_of_optimizers_that_differ_are_refused() -> None:
    """In a process_group, whose ranks all call step() equally often."""
    stage = nn.Linear(2, 2)
    optimizers = [engines.sgd_of(stage)][: dist.get_rank()]
    with engines.refused(ValueError, "the number of optimizers is 0 on rank 0 and 1 on rank 1"):
        mpinit.initialize(stage, optimizers, "O2", process_group=dist.group.WORLD)


@ranks(2)
def test_models_that_differ_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + dist.get_rank()))
    mpinit.initialize(model, engines.sgd_of(model), "O2", **SCALED)
    with engines.refused(ValueError, "1.weight is (4, 4) torch.float16 with a float32 master on rank 0 and (5, 4)"):
        DistributedDataParallel(model)


@ranks(2)
def test_settings_are_compared_without_addresses() -> None:
    model = engines.CASE.build()
    kept = [nn.LayerNorm, lambda name, module: name == "head"]
    mpinit.initialize(model, engines.sgd_of(model), "O2", keep_fp32=kept, **SCALED)
    DistributedDataParallel(model)


@ranks(2, ("ddp",), ("group",))
def test_settings_in_sets_are_the_same(engine: str) -> None:
    """Compare settings with a set, whose order differs by rank."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(4)], nn.Linear(4, 4))
    kept = {nn.LayerNorm, nn.BatchNorm1d, nn.GroupNorm, "0.0", "1.0", "2.0", "4"}
    group = {"process_group": dist.group.WORLD} if engine == "group" else {}
    optimizer = engines.sgd_of(model)
    mpinit.initialize(model, optimizer, "O2", keep_fp32=kept, entry_points={"forward", "extra_repr"}, **SCALED, **group)
    wrapped = DistributedDataParallel(model) if engine == "ddp" else model
    wrapped(torch.ones(1, 4)).sum().backward()


def frozen() -> Any:
    """A frozen layer and a constant buffer, beside what is trained; other numbers on every rank."""
    torch.manual_seed(dist.get_rank())
    base, head = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)
    table = nn.Buffer(torch.randn(6))
    return Parts(lambda self, x: self.head(self.base(x).tanh() + self.table), base=base, head=head, table=table)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(dist.get_rank())
    with mpinit.scale_loss(model(torch.randn(4, 6, generator=generator)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@ranks(2, ("O2",), ("split",), long=[("O5",)])
def test_unequal_seeds_leave_one_master_of_weight_unfrozen_later(level: str) -> None:
    model = frozen()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = engines.sgd_of(model.head)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    wrapped = DistributedDataParallel(model)
    engines.assert_one(list(model.parameters()))
    if dist.get_rank() == 0:
        # Frozen weights keep their rounding.
        assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items() if "base" not in name)
    step(wrapped, optimizer)
    model.base.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.base.parameters())})
    del wrapped
    wrapped = DistributedDataParallel(model)
    step(wrapped, optimizer)
    mpinit.undo(model)
    engines.assert_one(list(model.parameters()))


@ranks(2, ("O2",), ("split",), long=[("O0",), ("O1",), ("model",)])
def test_one_checkpoint_file_serves_all_ranks(level: str) -> None:
    model = engines.CASE.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    wrapped = DistributedDataParallel(model)
    batches = [engines.mine(batch) for batch in engines.CASE.batches(6)]
    train(wrapped, optimizer, batches[:2], engines.CASE.loss)
    saved = copy.deepcopy(mpinit.TrainState(model, optimizer).state_dict())
    train(wrapped, optimizer, batches[2:], engines.CASE.loss)
    again = engines.CASE.build()
    resumed = torch.optim.Adam(again.parameters(), lr=0.5)
    mpinit.initialize(again, resumed, **LEVELS[level])
    wrapped = DistributedDataParallel(again)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    mpinit.TrainState(wrapped, resumed, options=options).load_state_dict(saved if dist.get_rank() == 0 else {})
    engines.assert_one([value for state in resumed.state.values() for value in state.values()])
    assert resumed.param_groups[0]["lr"] == 0.01
    train(wrapped, resumed, batches[2:], engines.CASE.loss)
    engines.assert_same(engines.whole(again.state_dict()), engines.whole(model.state_dict()))
    engines.assert_one(again)
    engines.assert_one([value for state in resumed.state.values() for value in state.values()])


@ranks(2, (True,), (False,))
def test_one_rank_may_read_optimizer_state_before_a_step(by_torch: bool) -> None:
    model = engines.CASE.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, "O2", num_losses=2, **SCALED)
    wrapped = DistributedDataParallel(model)
    if dist.get_rank() == 0 and by_torch:
        assert len(get_optimizer_state_dict(wrapped, optimizer)["state"]) == len(list(model.parameters()))
        optimizer.state.clear()
    elif dist.get_rank() == 0:
        assert len(mpinit.TrainState(wrapped, optimizer).state_dict()["optim"]["state"]) > 0
    train(wrapped, optimizer, [engines.mine(batch) for batch in engines.CASE.batches(2)], engines.CASE.loss)
    assert mpinit.step_counts(optimizer) == (2, 0)
    engines.assert_one(model)


@ranks(2)
def test_overflow_under_no_sync_is_skipped_on_all_ranks() -> None:
    """It counts where gradients are averaged, on all ranks; what a rank has cleared before counts nowhere."""
    model = engines.CASE.build()
    optimizer = engines.sgd_of(model)
    mpinit.initialize(model, optimizer, "O2", **SCALED)
    wrapped = DistributedDataParallel(model)
    for index, batch in enumerate(map(engines.mine, engines.CASE.batches(6))):
        optimizer.zero_grad()
        bad = index in (1, 2) and dist.get_rank() == 1
        with wrapped.no_sync():
            engines.backward(wrapped, optimizer, batch, INF if bad else 1.0)
        if index == 2:
            optimizer.zero_grad()
        engines.backward(wrapped, optimizer, batch)
        optimizer.step()
        assert mpinit.step_was_skipped(optimizer) == (index == 1)
        engines.assert_one((mpinit.loss_scale(optimizer), mpinit.state_dict(optimizer)["loss_scaler0"]["unskipped"]))
        engines.assert_one(mpinit.step_counts(optimizer))
        engines.assert_one(model)
    assert mpinit.loss_scale(optimizer) == 512.0


@ranks(2, ("nothing",), ("world",), ("own",))
def test_gradients_averaged_by_hand_need_a_process_group(given: str) -> None:
    model = engines.CASE.build()
    optimizer = engines.sgd_of(model)
    group = {"world": {"process_group": dist.group.WORLD}, "own": engines.by_itself()}.get(given, {})
    mpinit.initialize(model, optimizer, "O2", **SCALED, **group)
    for index, batch in enumerate(map(engines.mine, engines.CASE.batches(3))):
        optimizer.zero_grad()
        bad = index == 1 and dist.get_rank() == 1
        engines.backward(model, optimizer, batch, INF if bad else 1.0)
        for parameter in model.parameters() if given != "own" else ():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(2)
        if given == "nothing":
            with engines.refused(RuntimeError, "1 other processes", "process_group=torch.distributed.group.WORLD"):
                optimizer.step()
            return
        optimizer.step()
    assert mpinit.step_counts(optimizer) == ((3, 0) if given == "own" and dist.get_rank() == 0 else (2, 1))
    if given == "world":
        engines.assert_one(model)
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


@ranks(2, ("O2",), ("split",), long=[("O5",), ("O3",)])
def test_gradients_are_reduced_in_float32_by_a_hook(level: str) -> None:
    """And their mean is rounded once."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    asked = LEVELS[level] | {"loss_scale": 1.0}
    mpinit.initialize(model, optimizer, **asked)
    dtype = model.weight.dtype
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, mpinit.float32_allreduce_hook)
    largest = 60000.0 if dtype is torch.float16 else 1.0
    ours = torch.tensor([[largest, -largest, 257.0, 1.0]]) * (1 if dist.get_rank() == 0 else 0.99)
    x = ours.to(dtype).float()
    kinds: list[torch.dtype] = []
    reduce = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        kinds.append(tensor.dtype)
        return reduce(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", noted), mpinit.scale_loss(wrapped(x).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert kinds == [torch.float32]
    mean = x.double()
    dist.all_reduce(mean)
    expected = (mean / 2).float().to(dtype).float()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad.float(), expected)


@ranks(2, ("O1", True), ("O2", True), long=[("O1", False), ("split", True)])
def test_fsdp1_after_initialize_is_refused(level: str, keeps: bool) -> None:
    model = engines.CASE.build()
    mpinit.initialize(model, engines.sgd_of(model), **LEVELS[level])
    with engines.refused(RuntimeError, "FSDP1", "fully_shard(model)"):
        FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=keeps)
    del model  # FSDP1 has flattened its parameters before it shows, so there is nothing to undo
    gc.collect()


@ranks(2)
def test_other_models_may_be_wrapped_as_before() -> None:
    model = engines.CASE.build()
    mpinit.initialize(model, engines.sgd_of(model), "O1", **SCALED)
    FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    DistributedDataParallel(nn.Linear(2, 2 + dist.get_rank() - dist.get_rank()))
    fully_shard(nn.Linear(2, 2), mesh=engines.mesh(2))
