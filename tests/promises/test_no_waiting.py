"""No step waits for its device: on the meta device, where nothing can be read back, reading anything raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import backward
from torch import nn
from torch.optim import optimizer as torch_optimizer

import mpinit

LEVELS = [
    *(("O0", {}), ("O1", {}), ("O2", {}), ("O3", {}), ("O4", {}), ("O5", {})),
    ("O5", {"loss_scale": "dynamic"}),
    ("O5", {"master_weights": "split"}),
    ("O2", {"loss_scale": 128.0}),
]


@pytest.fixture(autouse=True)
def _fused_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta"])


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(8 * 36, 200), nn.LayerNorm(200), nn.Linear(200, 5)),
        )
    return model, torch.optim.Adam(model.parameters(), fused=True)


def loss_of(model: nn.Module) -> torch.Tensor:
    x, y = torch.empty(2, 3, 8, 8, device="meta"), torch.empty(2, dtype=torch.long, device="meta")
    loss: torch.Tensor = nn.functional.cross_entropy(model(x), y)
    return loss


def test_reading_from_the_meta_device_raises() -> None:
    with pytest.raises(RuntimeError):
        torch.empty((), device="meta").item()


@pytest.mark.parametrize(("level", "more"), LEVELS)
def test_steps_with_accumulation_and_clipping(level: str, more: dict[str, Any]) -> None:
    model, optimizer = parts()
    mpinit.initialize(model, optimizer, level, verbosity=0, **more)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            loss = loss_of(model)
            # Looking at masters between a forward and its backward pass writes to no weight.
            assert len(list(mpinit.master_params(optimizer))) == len(list(model.parameters()))
            backward(loss, optimizer)
        mpinit.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    assert all(p.grad is not None for p in mpinit.master_params(optimizer))


@pytest.mark.parametrize(("level", "more"), LEVELS)
def test_two_optimizers_and_two_losses(level: str, more: dict[str, Any]) -> None:
    (first, one), (second, two) = parts(), parts()
    mpinit.initialize([first, second], [one, two], level, num_losses=2, verbosity=0, **more)
    for _ in range(2):
        for optimizer in (one, two):
            optimizer.zero_grad()
        backward(loss_of(first) + loss_of(second), [one, two], loss_id=0)
        backward(loss_of(second), two, loss_id=1)
        for optimizer in (one, two):
            optimizer.step()
