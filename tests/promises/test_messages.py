"""Error texts: each says what was given, what is allowed and what to do next."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import mpinit


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


@pytest.fixture
def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, sgd(model)


def says(caught: Any, *parts: str) -> None:
    missing = [part for part in parts if part.lower() not in str(caught.value).lower()]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize(
    ("models", "optimizers"),
    [("model", None), (None, None), ([nn.Linear(1, 1), 3], None), (nn.Linear(1, 1), "adam"), (nn.Linear(1, 1), [None])],
)
def test_what_is_no_module_or_optimizer_is_a_type_error_that_names_it(models: Any, optimizers: Any) -> None:
    with pytest.raises(TypeError) as caught:
        mpinit.initialize(models, optimizers, "O2")
    assert re.search("Module|Optimizer", str(caught.value))


def test_the_same_optimizer_twice(pair: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = pair
    mpinit.initialize(model, optimizer, "O2")
    with pytest.raises(ValueError) as caught:
        mpinit.initialize(net(), optimizer, "O2")
    says(caught, "SGD", "undo")


def test_duplicates_in_one_call() -> None:
    model = net()
    with pytest.raises(ValueError) as caught:
        mpinit.initialize([model, model], sgd(model), "O2")
    says(caught, "Sequential")
    optimizer = sgd(model)
    with pytest.raises(ValueError) as caught:
        mpinit.initialize(model, [optimizer, optimizer], "O2")
    says(caught, "SGD")


@pytest.mark.parametrize("owner", ["model", nn.Linear(1, 1), [nn.Linear(1, 1)]])
def test_undo_of_what_was_never_initialised(owner: Any) -> None:
    with pytest.raises(ValueError) as caught:
        mpinit.undo(owner)
    says(caught, "Linear" if owner != "model" else "str", "not initialised")
