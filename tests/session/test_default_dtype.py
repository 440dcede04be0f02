"""torch's default type, which scripts that load a large model set, changes no number of a training.

Below the public face: native code is switched off, so that torch's operations are tried too.
"""

import pytest
import torch
from loops import backward
from models import LEVELS
from torch import nn

import mpinit
from mpinit.torch_internals import native as native_code


def trained(default: torch.dtype, level: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 80), nn.LayerNorm(80), nn.ReLU(), nn.Linear(80, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(32, 100)
    try:
        torch.set_default_dtype(default)
        mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[level])
        for _ in range(6):
            optimizer.zero_grad()
            backward(model(x).float().square().mean(), optimizer)
            mpinit.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
        mpinit.undo(model)
    finally:
        torch.set_default_dtype(torch.float32)
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("level", sorted(LEVELS.keys() - {"O3"}))
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_numbers_do_not_depend_on_the_default_dtype(
    monkeypatch: pytest.MonkeyPatch, default: torch.dtype, level: str
) -> None:
    monkeypatch.setattr(native_code, "_module", None)
    assert all(map(torch.equal, trained(default, level), trained(torch.float32, level)))
