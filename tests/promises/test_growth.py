"""What steps cost grows with nothing, and no step waits for a device."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from loops import backward
from models import LEVELS
from torch import nn
from torch.optim import optimizer as torch_optimizer

import mpinit

# At four times the size as many calls, and no more than a little beside.
SMALL, LARGE = 6, 24
ALLOWED = 1.1 * LARGE / SMALL


def calls_of(function: Callable[[], Any]) -> int:
    """Count the calls of Python functions in a call."""
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def calls_of_a_life(way: dict[str, Any], modules: int, optimizers: int) -> dict[str, int]:
    """Calls of each part of a session's life, on as many modules and optimizers."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(modules)])
    shares = [list(model.parameters())[index::optimizers] for index in range(optimizers)]
    owned = [torch.optim.SGD(share, lr=0.1, momentum=0.9) for share in shares]

    def train() -> None:
        for optimizer in owned:
            optimizer.zero_grad()
        with mpinit.scale_loss(model(torch.ones(1, 2)).sum(), owned) as scaled_loss:
            scaled_loss.backward()
        for optimizer in owned:
            optimizer.step()

    counts = {"initialize": calls_of(lambda: mpinit.initialize(model, owned, **way))}
    train()
    counts["step"] = calls_of(train)
    counts["state_dict"] = calls_of(model.state_dict)
    counts["undo"] = calls_of(lambda: mpinit.undo(model))
    return counts


@pytest.mark.parametrize("of", ["modules", "modules and optimizers"])
@pytest.mark.parametrize("way", ["O1", "O2", "split", "model", "int8"])
def test_cost_of_each_call_is_linear(way: str, of: str) -> None:
    calls_of_a_life(LEVELS[way], 2, 1)
    small, large = (calls_of_a_life(LEVELS[way], size, 1 if of == "modules" else size) for size in (SMALL, LARGE))
    grown = {part: large[part] / small[part] for part in small}
    assert all(ratio < ALLOWED for ratio in grown.values()), grown


KINDS = [
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


@pytest.mark.parametrize(("level", "more"), KINDS)
def test_steps_with_accumulation_and_clipping(level: str, more: dict[str, Any]) -> None:
    model, optimizer = parts()
    mpinit.initialize(model, optimizer, level, **more)
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


@pytest.mark.parametrize(("level", "more"), KINDS)
def test_two_optimizers_and_two_losses(level: str, more: dict[str, Any]) -> None:
    (first, one), (second, two) = parts(), parts()
    mpinit.initialize([first, second], [one, two], level, num_losses=2, **more)
    for _ in range(2):
        for optimizer in (one, two):
            optimizer.zero_grad()
        backward(loss_of(first) + loss_of(second), [one, two], loss_id=0)
        backward(loss_of(second), two, loss_id=1)
        for optimizer in (one, two):
            optimizer.step()
