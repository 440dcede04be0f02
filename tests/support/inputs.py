"""What the tests of arguments share: a model that does what it is told with them, a batch, and a number to round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import quietly
from torch import nn

F16, F32 = torch.float16, torch.float32


class Calls(nn.Module):
    """Runs a function of the test's as its forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        nn.init.eye_(self.linear.weight), nn.init.zeros_(self.linear.bias)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear, *args, **kwargs)


def at_o2(function: Callable[..., Any]) -> nn.Module:
    return quietly(Calls(function))


X = torch.tensor([[1.0001, 2.0]])  # which float16 cannot represent
