"""Models that are initialised before their optimizers are made, at every level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import keywords
from torch import nn

import mpinit

BF16 = torch.bfloat16
SETTINGS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": keywords("O1"),
    "O2-float16": keywords("O2"),
    "O2-bfloat16": keywords("O2", BF16),
    "O2-split": keywords("O2", BF16) | {"master_weights": "split"},
    "O3": keywords("O3", BF16),
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5-split": {"opt_level": "O5", "master_weights": "split"},
}
with_masters = pytest.mark.parametrize("setting", ["O2-float16", "O2-split", "O5"])


def initialise(model: nn.Module, optimizers: Any, setting: str, **more: Any) -> None:
    mpinit.initialize(model, optimizers, **SETTINGS[setting] | {"verbosity": 0} | more)


def await_optimizers(model: nn.Module, setting: str, **more: Any) -> None:
    initialise(model, None, setting, await_optimizers=True, **more)
