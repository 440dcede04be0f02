"""The public rule of a dynamic loss scale: its values, its refusals, and how keywords and files set it."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpinit
from mpinit import DynamicLossScale


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def first_scale(level: str = "O2", **keywords: Any) -> float:
    model, optimizer = net()
    mpinit.initialize(model, optimizer, level, **keywords)
    return mpinit.loss_scale(optimizer)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("init", (0.0, -1.0, math.inf, math.nan, 2.0**127, 2.0**-127, True, "8", None)),
        ("max", (0.0, math.inf, None, 2.0**15)),
        ("min", (0.0, -1.0, 2.0**17, 2.0**25, "1")),
        ("growth_factor", (1.0, 0.5, math.inf, math.nan, "2", True)),
        ("backoff_factor", (0.0, 1.0, 2.0, math.nan, None)),
        *((name, (0, -1, 1.5, 2.0, True, "3", 2**31)) for name in ("growth_interval", "hysteresis")),
        ("max_consecutive_skips", (0, 63.5, None)),
    ],
)
def test_a_wrong_number_is_refused_at_construction(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
            DynamicLossScale(**{name: value})


def test_it_is_frozen_and_compares_by_value() -> None:
    rule = DynamicLossScale(init=8.0)
    assert rule == DynamicLossScale(8) and hash(rule) == hash(DynamicLossScale(8)) and rule != DynamicLossScale()
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.init = 4.0  # type: ignore[misc]


def test_it_makes_the_scale_dynamic_at_every_level() -> None:
    for level in mpinit.OPT_LEVELS:
        assert first_scale(level, loss_scale=DynamicLossScale(init=64.0)) == 64.0
    assert first_scale(loss_scale="dynamic") == first_scale(loss_scale=DynamicLossScale()) == first_scale() == 2.0**16


def test_limits_by_keyword_move_the_first_scale() -> None:
    assert first_scale(min_loss_scale=2.0**20) == 2.0**20
    assert first_scale(max_loss_scale=8.0) == 8.0
    assert first_scale(loss_scale=DynamicLossScale(init=4.0, max=8.0), min_loss_scale=16.0, max_loss_scale=32.0) == 16.0
    assert first_scale(loss_scale=2.0**30, max_loss_scale=8.0) == 2.0**30, "limits are for a dynamic scale"
    with pytest.raises(ValueError, match=r"min_loss_scale=16\.0 is above max_loss_scale=8\.0"):
        first_scale(min_loss_scale=16.0, max_loss_scale=8.0)


def test_a_table_of_a_file_is_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('opt_level = "O2"\n[loss_scale]\ninit = 32\ngrowth_interval = 7\n')
    model, optimizer = net()
    mpinit.initialize(model, optimizer, config=path)
    assert mpinit.loss_scale(optimizer) == 32.0
    for text, said in (("growth_intervall = 7", "growth_intervall"), ("growth_interval = 0", "growth_interval=0")):
        path.write_text(f"[loss_scale]\n{text}\n")
        with pytest.raises(ValueError, match=f"mine.toml'.*loss_scale: .*{said}"):
            mpinit.initialize(nn.Linear(2, 2), config=path)
