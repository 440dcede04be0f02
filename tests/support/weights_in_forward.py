"""Models at ``master_weights="model"``, whose parameters are float32 outside of forwards."""

from typing import Any

import torch
from torch import nn

import mpinit

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def start(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", **{"master_weights": "model", "verbosity": 0} | more)
    return optimizer


def is_float32_outside(model: nn.Module) -> None:
    assert all(p.dtype is F32 and p.is_leaf and type(p) is nn.Parameter for p in model.parameters())
