"""stalled: shares against a plain loop by hand, over levels, skips and embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import batches, iterate, mlp, mse, poison, start
from torch import nn

import mpinit


def measure(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> Any:
    batch = batches(1)[0]
    assert mpinit.stalled(optimizer, start=True) is None
    for _ in range(steps):
        iterate(mse(model, batch), optimizer)
    return mpinit.stalled(optimizer)


def tiny_steps(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-5)


def test_plain_bfloat16_stalls_and_masters_do_not() -> None:
    shares = {}
    for name, more in {
        "plain": {"opt_level": "O3", "cast_model_type": "bf16"},
        "full": {"opt_level": "O5"},
        "split": {"opt_level": "O5", "master_weights": "split"},
    }.items():
        model = mlp()
        optimizer = tiny_steps(model.parameters())
        mpinit.initialize(model, optimizer, verbosity=0, **more)
        result = measure(model, optimizer)
        shares[name] = result["0.weight"]
        assert ("master_weights=True" in mpinit.audit(model, optimizer).advice) == (name == "plain")
    assert shares["plain"] > 0.8
    assert shares["full"] < 0.1 and shares["split"] < 0.1


def test_the_share_is_that_of_elements_with_a_gradient_that_are_what_they_were() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mpinit.initialize(model, optimizer, "O3", cast_model_type="bf16", verbosity=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = measure(model, optimizer, steps=1)
    for name, parameter in model.named_parameters():
        meant = parameter.grad != 0
        share = float((parameter == before[name])[meant].double().mean())
        assert result[name] == pytest.approx(share)
    assert list(result.values()) == sorted(result.values(), reverse=True)


def test_rows_of_an_embedding_without_a_gradient_do_not_count() -> None:
    model = nn.Embedding(10, 4)
    optimizer = start(model, "O2", make=lambda p: torch.optim.SGD(p, lr=1.0))
    mpinit.stalled(optimizer, start=True)
    iterate(model(torch.tensor([1, 2])).square().sum(), optimizer)
    assert mpinit.stalled(optimizer) == {"weight": 0.0}


def test_skipped_steps_do_not_count() -> None:
    model, batch = mlp(), batches(1)[0]
    optimizer = start(model, "O2")
    mpinit.stalled(optimizer, start=True)
    iterate(poison(mse(model, batch), model[0].weight), optimizer)
    with pytest.raises(RuntimeError, match="no step was done"):
        mpinit.stalled(optimizer)
    iterate(mse(model, batch), optimizer)
    result = mpinit.stalled(optimizer)
    assert result is not None and max(result.values()) == 0.0


def test_float32_that_stalls_is_not_blamed_on_precision() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    mpinit.initialize(model, optimizer, "O0", verbosity=0)
    result = measure(model, optimizer)
    assert result["0.weight"] > 0.9
    assert mpinit.audit(model, optimizer).advice.endswith("stay as they are: raise the learning rate")


def test_it_has_to_be_started() -> None:
    optimizer = start(mlp(), "O2")
    with pytest.raises(RuntimeError, match="start=True"):
        mpinit.stalled(optimizer)
    with pytest.raises(RuntimeError, match="was not initialised"):
        mpinit.stalled(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), start=True)
