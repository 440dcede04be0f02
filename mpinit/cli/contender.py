"""One contender of ``mpinit bench``, trained in this process."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from ..amp import initialize, scale_loss, step_counts
from .objects import make_inputs, make_loss, make_model, make_optimizer, mean_square

TORCH_AMP: Final = {"torch.amp-fp16": torch.float16, "torch.amp-bf16": torch.bfloat16}

Step = Callable[[], torch.Tensor]


def measure(contender: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, and say what it took.

    Args:
        contender: a level, or one of ``TORCH_AMP``.
        arguments: those of ``mpinit bench``.

    Returns:
        "ms" a step, "memory" in bytes, whether it is "on_device", "losses", "first_loss", "loss", "skipped".
    """
    device = arguments.device
    inputs = make_inputs(arguments.input, arguments.batch, device)
    before = _resident()
    model = make_model(arguments.factory, device).train()
    optimizer = make_optimizer(arguments.optimizer, model, arguments.lr)
    loss_of = make_loss(arguments.loss) or mean_square

    def forward() -> torch.Tensor:
        return loss_of(model(*inputs))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step, skipped = _steps(contender, model, optimizer, forward, device)
        losses, times = [], []
        for _ in range(arguments.steps):
            started = time.perf_counter()
            loss = step()
            losses.append(float(loss))  # waits for the device
            times.append(time.perf_counter() - started)
    on_device = device != "cpu"
    memory = torch.get_device_module(device).max_memory_allocated() if on_device else max(0, _resident() - before)
    return {
        "ms": 1000 * statistics.median(times[len(times) // 2 :]),
        "memory": memory,
        "on_device": on_device,
        "losses": losses,
        "first_loss": losses[0],
        "loss": losses[-1],
        "skipped": skipped(),
    }


def _steps(
    contender: str, model: nn.Module, optimizer: torch.optim.Optimizer, forward: Step, device: str
) -> tuple[Step, Callable[[], int]]:
    """One step of training, and how many were skipped so far."""
    if contender in TORCH_AMP:
        return _steps_of_torch_amp(TORCH_AMP[contender], optimizer, forward, device)
    initialize(model, optimizer, contender, verbosity=0)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward()
        with scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda: step_counts(optimizer)[1]


def _steps_of_torch_amp(
    dtype: torch.dtype, optimizer: torch.optim.Optimizer, forward: Step, device: str
) -> tuple[Step, Callable[[], int]]:
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind) if dtype is torch.float16 else None
    skipped = 0

    def step() -> torch.Tensor:
        nonlocal skipped
        optimizer.zero_grad()
        with torch.autocast(kind, dtype):
            loss = forward()
        if scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < scale
        return loss.detach()

    return step, lambda: skipped


def _resident() -> int:
    """The most bytes this process has had in memory so far."""
    with contextlib.suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 0
