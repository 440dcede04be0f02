"""The small transformer of ``models`` on several processes: sharded, its optimizer, a backward pass of it."""

from __future__ import annotations

from typing import Any

import torch
from engines import mesh
from models import CASES
from torch import nn
from torch.distributed.fsdp import fully_shard

import mpinit

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CASE = CASES["transformer"]
# How near two processes come to one with the batches of both.
TOLERANCE = {F32: 1e-5, F16: 5e-3, BF16: 3e-2}


def sharded(over: Any = None, **policy: Any) -> nn.Module:
    """A model that FSDP2 has sharded over both processes, or over a mesh."""
    model: Any = CASE.build()
    over = over or mesh(2)
    fully_shard(model.layer, mesh=over, **policy)
    return fully_shard(model, mesh=over, **policy)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def backward(model: Any, optimizer: Any, batch: Any, factor: float = 1.0, **more: Any) -> None:
    with mpinit.scale_loss(CASE.loss(model(batch[0]), batch[1]) * factor, optimizer, **more) as scaled_loss:
        scaled_loss.backward()
