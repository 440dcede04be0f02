"""Source text of the standard library, and a small transformer that learns to write on from it, byte by byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn

MODULES = ("argparse", "ast", "datetime", "difflib", "inspect", "pathlib", "pickle", "tarfile", "typing")
LENGTH = 64


def load_text() -> torch.Tensor:
    """The source of some modules as bytes, one after the other."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = (path for name in MODULES for path in sorted(folder.glob(f"{name}.py")))
    return torch.tensor(list(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


class Block(nn.Module):
    """Attention to what came before, and two layers, each beside a way around."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Writer(nn.Module):
    """A causal transformer: (N, LENGTH) bytes to (N, LENGTH, 256) scores of the byte that follows."""

    def __init__(self, width: int = 32, blocks: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
