"""Ranks on an accelerator, by NCCL or by gloo over host copies: one rank is a mean over one, no bit may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import LEVELS
from session_device import device, placed
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
    made = nn.parallel.DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=engine == "ddp views")
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

        model = fully_shard(model, mesh=init_device_mesh(device().type, (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[level] | {"loss_scale": "dynamic"})
    runs = wrapped(engine, model)
    data = torch.Generator().manual_seed(1)
    for step in range(5):
        optimizer.zero_grad()
        x = placed(torch.randn(8, 16, generator=data))
        loss = runs(x).float().square().mean() * (float("inf") if step == 2 else 1.0)
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    state = {name: getattr(value, "full_tensor", value.clone)().cpu() for name, value in model.state_dict().items()}
    result = state, mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer)
    mpinit.undo(model)
    return result


@pytest.mark.parametrize(("engine", "level"), CASES)
def test_one_rank_changes_no_bit(engine: str, level: str, start_nccl: Any) -> None:
    if device().type == "sim" and engine in ("fsdp", "ddp bf16 hook"):
        pytest.skip("torch wants NCCL for these, or names its own groups alone")
    alone = trained("alone", level)
    start_nccl()
    state, scale, counts = trained(engine, level)
    assert (scale, counts) == alone[1:]
    assert all(torch.equal(state[name], value) for name, value in alone[0].items())
