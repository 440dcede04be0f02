"""Parameters that were put into a model after ``initialize``, in the place of those that its optimizer steps."""

import warnings
from typing import Any

import pytest
import torch
from loops import backward
from torch import nn
from torch.nn.utils import parametrizations

import mpinit

KINDS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O5": {"opt_level": "O5"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
    "O5, model": {"opt_level": "O5", "master_weights": "model"},
}


def made(kind: str, trained: int = 2) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD([p for part in model[-trained:] for p in part.parameters()], lr=0.1)
    mpinit.initialize(model, optimizer, verbosity=0, **KINDS[kind])
    return model, optimizer


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "O0"])
def test_a_new_head_that_no_optimizer_steps_is_warned_of_by_name(kind: str) -> None:
    model, optimizer = made(kind)
    model[1] = nn.Linear(4, 5, dtype=model[1].weight.dtype)
    with pytest.warns(UserWarning, match=r"2 parameters were put into the model .*'1.weight', '1.bias'"):
        loss = model(torch.randn(3, 4)).square().mean()
    before = model[1].weight.detach().clone()
    backward(loss, optimizer)
    optimizer.step()
    assert torch.equal(model[1].weight, before), "as in plain torch"
    model(torch.randn(3, 4))  # once


@pytest.mark.parametrize("kind", KINDS)
def test_other_changes_of_a_model_are_no_reason_to_warn(kind: str) -> None:
    for change in ("none", "an adapter", "a smaller one", "given to the optimizer", "weights that are not trained"):
        model, optimizer = made(kind, trained=1 if change == "weights that are not trained" else 2)
        dtype = model[1].weight.dtype
        match change:
            case "an adapter":
                model.append(nn.Linear(3, 3, dtype=dtype))
            case "a smaller one":
                model[1] = nn.Identity()
            case "given to the optimizer":
                model[1] = nn.Linear(4, 5, dtype=dtype)
                optimizer.add_param_group({"params": list(model[1].parameters())})
            case "weights that are not trained":
                model[0] = nn.Linear(4, 4, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.randn(3, 4))


def test_weight_norm_after_initialize_is_warned_of() -> None:
    model, _ = made("O5")
    parametrizations.weight_norm(model[1])
    with pytest.warns(UserWarning, match=r"'1.parametrizations.weight.original0'"):
        model(torch.randn(3, 4))
