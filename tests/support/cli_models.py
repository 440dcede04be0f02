"""What the tests of the command line name: models, losses, and factories that go wrong."""

from collections import OrderedDict

import torch
from torch import Tensor, nn


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


NOT_A_FUNCTION = 3


def deep() -> nn.Module:
    """Whose modules have long names."""
    model = classifier()
    for name in ("inside_of_another_block", "of_the_encoder_with_a_long_name"):
        model = nn.Sequential(OrderedDict([(name, model)]))
    return model


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = classifier()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def returns_no_model() -> int:
    return 3


def raises() -> nn.Module:
    raise KeyError("on purpose")


def first_class(output: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))
