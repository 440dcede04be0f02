"""What the checks of two processes share: their halves of a batch, one process with all of it, and that ranks agree."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models import CASES, level_arguments, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import mpinit

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CASE = CASES["transformer"]


TOLERANCE = {F32: 1e-5, F16: 5e-3, BF16: 3e-2}
GRID = [("O0", F32), *((level, dtype) for level in ("O1", "O2", "O3") for dtype in (F16, BF16))]


def mine(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's half of a batch."""
    x, y = batch
    return x.chunk(2)[dist.get_rank()], y.chunk(2)[dist.get_rank()]


def full(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in state.items()
    }


def assert_ranks_agree(value: Any) -> None:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, value)
    if isinstance(value, dict):
        assert all(torch.equal(gathered[0][name], gathered[1][name]) for name in gathered[0])
    else:
        assert gathered[0] == gathered[1], gathered


def assert_close(state: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert state.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(state[name], expected[name], atol=tolerance, rtol=tolerance, msg=name)


def pair(level: str, dtype: torch.dtype, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = CASE.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mpinit.initialize(model, optimizer, **level_arguments(level, dtype), **more)
    return model, optimizer


def alone(level: str, dtype: torch.dtype, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Training in one process on the whole batches."""
    model, optimizer = pair(level, dtype)
    train(model, optimizer, batches, CASE.loss)
    state = full(model.state_dict())
    mpinit.undo(model)
    return state
