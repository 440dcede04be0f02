"""Train one network at one level, and record what mixed precision did on the way."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import mpinit

from .digits_data import Digits
from .network import digits_net
from .progress import Progress


@dataclass(frozen=True)
class Setting:
    """One row of the table: a level, the 16-bit type it works in, and the keywords that ask for both."""

    level: str
    dtype: str
    keywords: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.level} {self.dtype}"


# bfloat16 has float32's range: nothing needs scaling.
SETTINGS = (
    Setting("O0", "fp32", {}),
    Setting("O1", "fp16", {}),
    Setting("O1", "bf16", {"patch_torch_functions_type": "bf16", "loss_scale": 1.0}),
    Setting("O2", "fp16", {}),
    Setting("O2", "bf16", {"cast_model_type": "bf16", "loss_scale": 1.0}),
    Setting("O3", "fp16", {}),
    Setting("O3", "bf16", {"cast_model_type": "bf16"}),
)


@dataclass(frozen=True)
class Schedule:
    """How long and how wide to train."""

    epochs: int = 10
    batch_size: int = 64
    width: int = 16
    peak_lr: float = 1e-2
    # The usual 2,000 good steps would be longer than the whole run: let the loss scale be seen to move.
    growth_interval: int = 25


@dataclass
class Run:
    """What one run leaves behind."""

    setting: Any
    accuracy: float = 0.0
    seconds: float = 0.0
    weight_bytes: int = 0
    optimizer_bytes: int = 0
    skipped_steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)

    @property
    def diverged_at(self) -> int | None:
        """The first step whose loss was not finite, None if there is none."""
        return next((step for step, loss in enumerate(self.losses) if not math.isfinite(loss)), None)


def size_of(tensors: Any) -> int:
    """Bytes held by distinct tensors."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors if torch.is_tensor(t)}.values())


def measure_memory(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights: what the model holds. Optimizer: its state and, where there are any, the float32 masters."""
    own = {id(parameter) for parameter in model.parameters()}
    masters = [parameter for parameter in mpinit.master_params(optimizer) if id(parameter) not in own]
    states = [value for state in optimizer.state.values() for value in state.values()]
    run.weight_bytes = size_of([*model.parameters(), *model.buffers()])
    run.optimizer_bytes = size_of([*masters, *states])


def accuracy_of(model: nn.Module, digits: Digits) -> tuple[float, float]:
    """Loss on the test images, and the share of them that the model reads correctly."""
    model.eval()
    with torch.no_grad():
        scores = model(digits.test_images)
    loss = nn.functional.cross_entropy(scores, digits.test_labels)
    return float(loss), float((scores.argmax(dim=1) == digits.test_labels).float().mean())


def train(setting: Setting, digits: Digits, schedule: Schedule) -> tuple[Run, nn.Module]:
    """Train from the same start and in the same order of batches, whatever the setting; not on after a nan."""
    torch.manual_seed(0)
    order = torch.Generator().manual_seed(0)
    model = digits_net(schedule.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.peak_lr, weight_decay=1e-2)
    rule = mpinit.DynamicLossScale(growth_interval=schedule.growth_interval)
    scaling = {"loss_scale": rule} if mpinit.OPT_LEVELS[setting.level].loss_scale == "dynamic" else {}
    mpinit.initialize(model, optimizer, setting.level, **scaling | setting.keywords)
    steps = schedule.epochs * (len(digits.train_images) // schedule.batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.peak_lr, total_steps=steps)
    run = Run(setting)
    started = time.perf_counter()
    with Progress(f"{setting.name:8}", schedule.epochs, steps // schedule.epochs) as progress:
        for _ in range(schedule.epochs):
            if run.diverged_at is not None:
                break
            for images, labels in digits.batches(schedule.batch_size, order):
                one_step(run, model, optimizer, images, labels)
                mpinit.scheduler_step(scheduler)
                progress.step()
            progress.epoch(loss=f"{run.losses[-1]:.4f}", scale=f"{run.loss_scales[-1]:,.0f}")
    run.seconds = time.perf_counter() - started
    measure_memory(run, model, optimizer)
    _, run.accuracy = accuracy_of(model, digits)
    mpinit.undo([model, optimizer])
    return run, model


def one_step(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> None:
    """The training step of any script that uses mpinit, and a few notes for the plot."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    with mpinit.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    if mpinit.step_was_skipped(optimizer):
        run.skipped_steps.append(len(run.losses))
    run.losses.append(loss.item())
    run.loss_scales.append(mpinit.loss_scale(optimizer))
