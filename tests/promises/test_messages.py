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


NET = net()


@pytest.mark.parametrize(
    ("models", "optimizers", "said"),
    [
        (sgd(NET), NET, "models must be a torch.nn.Module, or a list or tuple of them; got SGD. .* swapped"),
        (NET.parameters(), None, r"got generator, as model.parameters\(\) .*give the model itself"),
        (NET, NET.parameters(), "got generator, .*give the optimizer that was made from the parameters"),
        (NET, list(NET.parameters()), "got Parameter, .*give the optimizer"),
        (NET.state_dict(), None, r"got OrderedDict, as state_dict\(\) returns: give the object"),
        (nn.Linear, None, "got the class Linear, not an object of it"),
        (3, 4, "models must be a torch.nn.Module, .*got int$"),
        ([NET, None], None, "got NoneType$"),
    ],
)
def test_what_was_probably_meant_is_said(models: Any, optimizers: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        mpinit.initialize(models, optimizers)


def test_a_loss_and_its_optimizer_swapped(pair: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    mpinit.initialize(*pair)
    with pytest.raises(TypeError, match=r"got Tensor\. The loss comes first .* swapped"):
        mpinit.scale_loss(pair[1], torch.ones(()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Sequential is no optimizer of session \d+ .*: give the optimizer"):
        next(mpinit.master_params(pair[0]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"opt_levle": "O2"}, "did you mean 'opt_level'.* There are: models, optimizers, opt_level, .*loss_scale"),
        ({"opt_level": "O2", "keep_fp32": "hedd"}, "'hedd' matches no module; there are '0', '1'"),
        ({"opt_level": "O2", "keep_fp32": "10"}, "'10' matches no module; near it are '1', '0'"),
    ],
)
def test_a_refusal_lists_what_there_is_and_ends_at_the_users_line(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        mpinit.initialize(net(), **keywords)
    assert [entry.name for entry in caught.traceback][1:] == ["initialize"]


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
