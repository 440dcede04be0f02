"""Real text that every machine with Python has: the source of the standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

VOCABULARY = 128


def standard_library(characters: int) -> torch.Tensor:
    """The first ``characters`` bytes of the standard library's modules, in order of name, as ASCII codes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= characters:
            break
    codes = torch.frombuffer(text, dtype=torch.uint8)[:characters]
    return codes.clamp(max=VOCABULARY - 1).long()
