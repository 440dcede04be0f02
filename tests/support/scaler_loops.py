"""What the tests of mpinit.GradScaler begin with, at every level that can scale a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import backward, batches, gradients, mlp, mse, plain_sgd

import mpinit

START: dict[str, Any] = {"loss_scale": "dynamic", "init_loss_scale": 8.0, "growth_interval": 2, "verbosity": 0}
SCALED: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"} | START,
    "O1": {"opt_level": "O1"} | START,
    "O2": {"opt_level": "O2"} | START,
    "split": {"opt_level": "O5", "master_weights": "split"} | START,
    "O3": {"opt_level": "O3"} | START,
}
each_scaled = pytest.mark.parametrize("setting", SCALED)


def begin(setting: str = "O2", make: Any = plain_sgd, **more: Any) -> tuple[Any, Any, Any]:
    """A model, its optimizer and a GradScaler."""
    model = mlp()
    optimizer = make(model.parameters())
    mpinit.initialize(model, optimizer, **SCALED[setting] | more)
    return model, optimizer, mpinit.GradScaler(optimizer)


def gradients_of(setting: str) -> list[torch.Tensor | None]:
    """The unscaled gradients of the first batch, through scale_loss."""
    model, optimizer, _ = begin(setting)
    backward(mse(model, batches(1)[0]), optimizer)
    return gradients(optimizer)
