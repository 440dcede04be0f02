"""A model whose parts are called by themselves, and its first part by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Autoencoder(nn.Module):
    """Has its parts called by themselves, as a LightningModule's training_step does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.norm = nn.BatchNorm1d(4)
        self.decoder = nn.Linear(4, 4)
        self.loss = nn.MSELoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(self.forward_features(x)))

    def forward_features(self, x: Tensor, scale: float = 1.0) -> Tensor:
        assert x.dtype is self.encoder[0].weight.dtype, "a method finds the types that forward finds"
        return self.encoder(x) * scale

    def training_step(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.decoder(self.norm(self.encoder(x))), target)


def by_hand(model: Autoencoder, x: Tensor, dtype: torch.dtype) -> Tensor:
    first, _, last = model.encoder
    hidden = F.relu(F.linear(x.to(dtype), first.weight, first.bias))
    return F.linear(hidden, last.weight, last.bias).float()


LEVELS = {"O2": F16, "O3": F16, "O5": BF16}
