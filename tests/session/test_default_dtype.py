"""torch's default type, which scripts that load a large model set, changes no number of a training."""

from typing import Any

import pytest
import torch
from torch import nn

import mpinit

WAYS: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "model": {"opt_level": "O5", "master_weights": "model"},
    "int8": {"opt_level": "O5", "optimizer_state": "int8"},
    "bfloat16": {"opt_level": "O0", "optimizer_state": "bfloat16"},
}


def trained(default: torch.dtype, way: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 80), nn.LayerNorm(80), nn.ReLU(), nn.Linear(80, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(32, 100)
    try:
        torch.set_default_dtype(default)
        mpinit.initialize(model, optimizer, verbosity=0, **way)
        for _ in range(6):
            optimizer.zero_grad()
            with mpinit.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            mpinit.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
        mpinit.undo(model)
    finally:
        torch.set_default_dtype(torch.float32)
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_numbers_do_not_depend_on_it(default: torch.dtype, way: str) -> None:
    assert all(map(torch.equal, trained(default, WAYS[way]), trained(torch.float32, WAYS[way])))
