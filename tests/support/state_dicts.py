"""What the tests of state dicts share: levels with masters, and a file between saving and loading."""

from __future__ import annotations

import io
from typing import Any

import torch

MASTERS: dict[str, dict[str, Any]] = {
    "fp16": {"opt_level": "O2"},
    "bf16": {"opt_level": "O5"},
    "bf16 split": {"opt_level": "O5", "master_weights": "split"},
}


def saved(state: Any) -> Any:
    """Through a file, and back with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
