"""What the tests of the command line name: models and factories that go wrong."""

import torch
from torch import nn


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


NOT_A_FUNCTION = 3


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = classifier()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def returns_no_model() -> int:
    return 3


def raises() -> nn.Module:
    raise KeyError("on purpose")
