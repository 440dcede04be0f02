"""What describe tells."""

import pytest
import torch
from loops import iterate, start
from torch import nn

import mpinit


def test_describe_shows_level_dtypes_masters_scale_and_skips() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = start(model, make=torch.optim.Adam)
    for factor in (1.0, float("inf")):
        iterate(model(torch.randn(3, 4)).square().mean() * 0.01 * factor, optimizer)
    text = mpinit.describe(optimizer)
    assert text == mpinit.describe(model)
    for part in (
        "(O2: Sequential; Adam)",
        "cast_model_type = torch.float16",
        "Adam: 1 step done, 1 skipped, 1 of them in a row just now",
        "scale 512, 0 good backward passes since it moved",
    ):
        assert part in text


def test_describe_of_uninitialised_or_disabled_objects() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="was not initialised"):
        mpinit.describe(model)
    mpinit.initialize(model, enabled=False)
    assert mpinit.describe(model) == "mixed precision is disabled"
