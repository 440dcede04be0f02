"""Torch's functions that modules keep as attributes: models with them are pickled at O1 and O4, and cast them."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import mpinit

# Not a global of its own, which would be one that a module has imported early.
ORIGINALS = {"normalize": F.normalize}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.norm = F.normalize
        self.multiply = torch.matmul
        self.loss = F.cosine_similarity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def saved_whole(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.save": saved_whole,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_made_before", [True, False])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_model_is_saved_whole_while_it_is_initialised(level: str, is_made_before: bool, way: str) -> None:
    other = nn.Linear(2, 2)
    model: nn.Module = Net()
    if not is_made_before:
        mpinit.initialize(other, SGD(other.parameters(), lr=0.1), level)
        model = Net()
    mpinit.initialize(model, SGD(model.parameters(), lr=0.1), level)
    x = torch.ones(3, 4)
    expected = model(x)
    torch.testing.assert_close(WAYS[way](model)(x).float(), expected.float(), rtol=0.01, atol=0.01)
    mpinit.undo(model)
    if not is_made_before:
        mpinit.undo(other)
    assert model.norm is F.normalize is ORIGINALS["normalize"]
    torch.testing.assert_close(WAYS[way](model)(x), F.normalize(model.linear(x)))  # type: ignore[operator]


def test_stored_function_casts_as_its_name_does() -> None:
    model = Net()
    mpinit.initialize(model, SGD(model.parameters(), lr=0.1), "O1")
    a, b = torch.randn(2, 3, 4).half()
    assert model.loss(a, b).dtype is F.cosine_similarity(a, b).dtype


def test_attribute_that_was_replaced_meanwhile_stays() -> None:
    model = Net()
    mpinit.initialize(model, SGD(model.parameters(), lr=0.1), "O1")
    model.norm = F.relu
    mpinit.undo(model)
    assert model.norm is F.relu
