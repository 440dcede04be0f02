"""What of torch is another object while a session without O1 lives: ``nn.Parameter.data``, and nothing after it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame
import torch.distributed.checkpoint.state_dict
import torch.optim.swa_utils
from torch import nn

import mpinit

KINDS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O2": {"opt_level": "O2"},
    "O3": {"opt_level": "O3"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "model": {"opt_level": "O5", "master_weights": "model"},
    "int8": {"opt_level": "O5", "optimizer_state": "int8"},
}
CLASSES = (
    *(nn.Module, nn.Parameter, torch.Tensor, torch.optim.Optimizer, torch.optim.AdamW, nn.Linear, nn.LayerNorm),
    *(nn.parallel.DistributedDataParallel, torch.optim.swa_utils.AveragedModel, torch.amp.GradScaler),
)


def picture() -> dict[str, int]:
    """The ids of what torch's modules and these classes hold, but for what torch itself sets."""
    owners: dict[str, Any] = {name: module for name, module in sys.modules.items() if name.startswith("torch.")}
    owners |= {f"{cls.__module__}.{cls.__qualname__}": cls for cls in CLASSES}
    return {
        f"{owner}.{name}": id(value)
        for owner, holder in owners.items()
        for name, value in list(vars(holder).items())
        if issubclass(type(value), (types.FunctionType, type, property))
    }


@pytest.mark.parametrize("kind", KINDS)
def test_torch_is_what_it_was(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.TransformerEncoderLayer(8, 2), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, 4)).sum().backward()
    optimizer.step()
    before = picture()
    mpinit.initialize(model, optimizer, verbosity=0, keep_fp32=["1"] if kind != "O0" else None, **KINDS[kind])
    with mpinit.scale_loss(model(torch.ones(1, 3, 4)).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    during = picture()
    changed = {name for name in before if during.get(name) != before[name]}
    assert not changed
    assert ("data" in vars(nn.Parameter)) == (kind in ("O2", "int8"))
    mpinit.undo(model)
    after = picture()
    assert not {name for name in before if after.get(name) != before[name]}
    assert "data" not in vars(nn.Parameter)
