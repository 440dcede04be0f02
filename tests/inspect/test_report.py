"""describe(): what a session was initialised with and how it fares."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpinit


def test_it_tells_level_dtypes_masters_scale_and_skips() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    mpinit.initialize(model, optimizer, "O2", verbosity=0)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        with mpinit.scale_loss(model(torch.randn(3, 4)).square().mean() * 0.01 * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    text = mpinit.describe(optimizer)
    assert text == mpinit.describe(model)
    for part in (
        "(O2: Sequential; Adam)",
        "cast_model_type = torch.float16",
        "Adam: 1 step done, 1 skipped, 1 of them in a row just now",
        "scale 32768, 0 good backward passes since it moved",
    ):
        assert part in text


def test_what_is_not_initialised_or_disabled() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="was not initialised"):
        mpinit.describe(model)
    mpinit.initialize(model, enabled=False)
    assert mpinit.describe(model) == "mixed precision is disabled"


def test_one_of_a_thing_is_said_in_the_singular() -> None:
    model = nn.Linear(1, 1, bias=False)
    mpinit.initialize(model, opt_level="O2", await_optimizers=True, init_loss_scale=8.0, verbosity=0)
    assert "1 weight waits for an optimizer" in mpinit.describe(model)
    optimizer = mpinit.add_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    with mpinit.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    told = mpinit.describe(model)
    assert "1 step done, 0 skipped" in told
    assert "1 good backward pass since it moved" in told
