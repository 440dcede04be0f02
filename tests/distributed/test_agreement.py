"""Agreement of ranks: settings, numbers, policies.

Below the public face: groups of FSDP that a single process cannot make are stand-ins.
"""

import contextlib
import math
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engines import CASE, backward, mesh, mine, on_all_ranks, refused, sgd_of, sharded
from models import Parts
from processes import ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mpinit
from mpinit.distributed import sharding

SCALED = {"loss_scale": mpinit.DynamicLossScale(init=1024.0)}


@ranks(2, ("ddp",), ("fsdp",))
def test_agreement_needs_one_collective_and_none_for_replicas(engine: str) -> None:
    model = CASE.build() if engine == "ddp" else sharded()
    optimizer = sgd_of(model)
    mpinit.initialize(model, optimizer, "O2", **SCALED)
    wrapped = DistributedDataParallel(model) if engine == "ddp" else model
    batches = [mine(batch) for batch in CASE.batches(4)]
    backward(wrapped, optimizer, batches[0])
    optimizer.step()
    names = ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list")
    with contextlib.ExitStack() as patches:
        sent = [patches.enter_context(mock.patch.object(dist, n, wraps=getattr(dist, n))) for n in names]
        for index, batch in enumerate(batches[1:]):
            backward(wrapped, optimizer, batch, delay_unscale=index < 2)
        optimizer.step()
    assert [each.call_count for each in sent] == [0 if engine == "ddp" else 1, 0, 0, 0]
    assert mpinit.step_counts(optimizer) == (2, 0)


def refuse_a_chain(level: str) -> None:
    """Share a part of the model with the rank before, and another with the rank after: no verdict reaches all ranks."""
    meshes = [DeviceMesh("cpu", [rank, rank + 1]) for rank in range(dist.get_world_size() - 1)]
    own = [part for part in meshes if dist.get_rank() in part.mesh]
    model = nn.Sequential(*[fully_shard(nn.Linear(4, 4), mesh=part) for part in own])
    with refused(ValueError, f"of {dist.get_world_size()} ranks", "process_group=torch.distributed.group.WORLD"):
        mpinit.initialize(model, sgd_of(model), level, **SCALED if level == "O2" else {"skip_nonfinite": True})


@ranks(3, ("O2",), ("O5",))
def test_two_meshes_that_overlap_are_refused_on_all_ranks(level: str) -> None:
    refuse_a_chain(level)


@ranks(4, ("O2",), ("O5",))
def test_three_meshes_that_overlap_are_refused_on_all_ranks(level: str) -> None:
    refuse_a_chain(level)


def experts() -> Any:
    """A layer that all ranks run, and a sharded one that only those run which have tokens."""

    def run(self: Any, x: Tensor, has_tokens: bool) -> Tensor:
        return self.common(x) + self.expert.to_local().sum() if has_tokens else self.common(x)

    expert = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh(2), [Shard(0)]))
    return Parts(run, common=nn.Linear(4, 4), expert=expert)


@ranks(2, ("O2",), long=[("O1",)])
def test_expert_without_tokens_does_not_block_ranks(level: str) -> None:
    model = experts()
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


@ranks(2, ("plain",), ("mesh",))
def test_stages_skip_together(kind: str) -> None:
    """Train a pipeline: every rank has a stage of its own, plain or sharded over a mesh of its own."""
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


@ranks(2)
def test_process_groups_are_checked() -> None:
    model = nn.Linear(2, 2)
    with refused(TypeError, "ProcessGroup"):
        mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", process_group="world")


@ranks(2, (1.0,), (2.0,), (float("inf"),))
def test_gradients_of_any_meshes_are_clipped_as_in_one_process(order: float) -> None:
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    wholes = [torch.randn(5, 4) * 3 for _ in range(5)]
    line = mesh(2)

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
    mpinit.initialize([], optimizer, "O1")
    total = mpinit.clip_grad_norm_(optimizer, 1.0, order)
    torch.testing.assert_close(total, expected)
    assert on_all_ranks(total.item()) == [total.item()] * 2
    for ours, theirs in zip(several, alone, strict=False):
        got = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(got, theirs.grad)


@ranks(2)
def test_stages_are_clipped_as_one_model() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    mpinit.initialize([], optimizer, "O1")
    parameter.grad = torch.tensor([(3.0, 4.0)[dist.get_rank()]])
    # What adds up over processes, or is their largest, is no norm of these orders.
    for order in (0, -1.0, -math.inf):
        with pytest.raises(ValueError, match=f"norm_type must be above 0 .*, not {order}"):
            mpinit.clip_grad_norm_(optimizer, 1.0, order, process_group=dist.group.WORLD)
    anyway: Any = "inf"
    assert mpinit.clip_grad_norm_(optimizer, 9.0, anyway, process_group=dist.group.WORLD).item() == 4.0
    assert mpinit.clip_grad_norm_(optimizer, 1.0, process_group=dist.group.WORLD).item() == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([(0.6, 0.8)[dist.get_rank()]]))


@ranks(2)
def test_step_without_gradients_warns_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    mpinit.initialize([model], optimizer, "O1", loss_scale=8.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with mpinit.scale_loss(model[0](torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    assert ["does nothing" in str(warning.message) for warning in caught].count(True) == 1


def entry(name: str, asked: torch.dtype | None) -> Any:
    policy = SimpleNamespace(param_dtype=asked)
    return SimpleNamespace(sharded_param=nn.Parameter(torch.ones(2)), _param_fqn=name, mp_policy=policy)


@pytest.mark.parametrize("place", [0, 1])
def test_fsdp_policy_of_every_parameter_is_checked(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype | None] = [torch.bfloat16, torch.bfloat16]
    group = SimpleNamespace(fsdp_params=[entry("a", asked[0]), entry("b", asked[1])])
    monkeypatch.setattr(sharding, "groups_of_fsdp", lambda model: [group])
    targets = {each.sharded_param: torch.bfloat16 for each in group.fsdp_params}
    sharding.check_groups([nn.Identity()], targets, keeps_shards=True)
    group.fsdp_params[place].mp_policy.param_dtype = torch.float32
    with pytest.raises(ValueError, match=f"torch.float32.*{'ab'[place]}.*torch.bfloat16"):
        sharding.check_groups([nn.Identity()], targets, keeps_shards=True)
