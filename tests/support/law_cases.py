"""One weight under O2, with gradients that every type holds exactly: what the law's cases are written with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import backward, keywords, plain_sgd
from torch import nn

import mpinit

# (16-bit type, masters)
MODES = [(torch.float16, True), (torch.bfloat16, True), (torch.bfloat16, "split")]
each_mode = pytest.mark.parametrize(("dtype", "masters"), MODES, ids=["float16", "bfloat16", "split"])
full_masters = pytest.mark.parametrize(("dtype", "masters"), MODES[:2], ids=["float16", "bfloat16"])

# No 16-bit type holds these.
START = torch.tensor([[1.0001, -2.0003, 0.3337]])
GRADIENT = torch.tensor([[1.0, 2.0, -1.0]])


def one_weight() -> nn.Linear:
    """A model with one weight that is :data:`START`, and with the gradient :data:`GRADIENT` after :func:`pull`."""
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(START)
    return model


def begin(dtype: torch.dtype, masters: Any, make: Any = plain_sgd) -> tuple[nn.Linear, Any]:
    """The model and an optimizer whose step subtracts the gradient, initialised."""
    model = one_weight()
    optimizer = make(model.parameters())
    initialise(model, optimizer, dtype, masters)
    return model, optimizer


def initialise(model: Any, optimizers: Any, dtype: torch.dtype, masters: Any, level: str = "O2") -> None:
    """``initialize``, with dynamic scaling."""
    more = {"master_weights": masters, "loss_scale": "dynamic", "init_loss_scale": 1024.0} if level == "O2" else {}
    mpinit.initialize(model, optimizers, **keywords(level, dtype) | more)


def pull(model: nn.Module, optimizers: Any, times: float = 1.0) -> None:
    """A backward pass that adds ``times`` :data:`GRADIENT`."""
    backward(model(GRADIENT).sum() * times, optimizers)


def number(model: nn.Module, name: str = "weight") -> torch.Tensor:
    """The weight's float32 number."""
    value = model.state_dict()[name]
    assert value.dtype is torch.float32
    return value.clone()


def is_number(model: nn.Module, expected: torch.Tensor, name: str = "weight") -> None:
    """Assert that a weight's number is this to the bit, and after an undo the weight itself."""
    assert torch.equal(number(model, name), expected), f"{number(model, name)} instead of {expected}"
    mpinit.undo(model)
    assert torch.equal(model.get_parameter(name), expected)


def entry(optimizer: Any, group: int = 0, index: int = 0) -> Any:
    """What stands in a group."""
    return optimizer.param_groups[group]["params"][index]
