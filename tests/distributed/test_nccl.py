"""Ranks on an accelerator, by NCCL or by gloo over host copies: one rank is a mean over one, no bit may change."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import LEVELS
from session_device import choose, device, placed
from simulated_device import hosted
from torch import Tensor, nn

import mpinit

pytestmark = pytest.mark.gpu

CASES = [
    *[(engine, level) for engine in ("ddp", "ddp views") for level in ("O2", "O5", "split", "model")],
    *[("fsdp", "O2"), ("fsdp", "O5"), ("ddp bf16 hook", "O5"), ("ddp bf16 hook", "split")],
]


@pytest.fixture
def start_nccl() -> Iterator[Any]:
    """Starts a group of one rank."""

    def start() -> None:
        hosted.register()
        torch.accelerator.set_device_index(0)
        backend = "nccl" if device().type == "cuda" else "hosted"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def wrapped(engine: str, model: nn.Module) -> Any:
    if not engine.startswith("ddp"):
        return model
    views = engine == "ddp views"
    ids = None if device().type == "cpu" else [0]
    made = nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=views)
    if engine == "ddp bf16 hook":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        made.register_comm_hook(None, bf16_compress_hook)
    return made


def trained(engine: str, level: str) -> tuple[dict[str, Tensor], float, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    model = placed(model)
    if engine == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model, mesh=init_device_mesh(device().type, (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mpinit.initialize(model, optimizer, **LEVELS[level] | {"loss_scale": "dynamic"})
    runs = wrapped(engine, model)
    data = torch.Generator().manual_seed(1)
    for step in range(5):
        optimizer.zero_grad()
        rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        x = placed(torch.randn(8, 16, generator=data)[rank::count])
        loss = runs(x).float().square().mean() * (float("inf") if step == 2 and rank == count - 1 else 1.0)
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    state = {name: getattr(value, "to_local", value.clone)().cpu() for name, value in model.state_dict().items()}
    result = state, mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer)
    mpinit.undo(model)
    return result


@pytest.mark.parametrize(("engine", "level"), CASES)
def test_one_rank_changes_no_bit(engine: str, level: str, start_nccl: Any) -> None:
    if device().type == "sim" and engine == "ddp bf16 hook":
        pytest.skip("torch wants NCCL for it")
    alone = trained("alone", level)
    start_nccl()
    state, scale, counts = trained(engine, level)
    assert (scale, counts) == alone[1:]
    assert all(torch.equal(state[name], value) for name, value in alone[0].items())


TWO = [("ddp", "O2"), ("ddp views", "split"), ("ddp", "model"), ("fsdp", "O2"), ("fsdp", "O5")]


def one_of_two(rank: int, where: str, folder: str) -> None:
    choose(where)
    hosted.register()
    store = dist.FileStore(f"{folder}/{where}", 2)
    dist.init_process_group("hosted" if where == "sim" else "gloo", store=store, rank=rank, world_size=2)
    torch.save([trained(engine, level) for engine, level in TWO], f"{folder}/{where} {rank}")
    dist.destroy_process_group()


def test_two_ranks_have_the_bits_of_two_on_the_cpu(tmp_path: Path) -> None:
    if device().type != "sim":
        pytest.skip("of the simulated device alone")
    for where in ("sim", "cpu"):
        torch.multiprocessing.spawn(one_of_two, (where, str(tmp_path)), 2)
    for rank in range(2):
        on_cpu, on_device = (torch.load(tmp_path / f"{where} {rank}") for where in ("cpu", "sim"))
        for (state, *rest), (expected, *more) in zip(on_device, on_cpu, strict=True):
            assert rest == more
            assert all(torch.equal(state[name], value) for name, value in expected.items())
