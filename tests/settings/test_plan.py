"""plan: each property set comes out as one inert plan without None or spellings."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mpinit.plan import Plan, make_plan
from mpinit.settings.opt_levels import OPT_LEVELS
from mpinit.settings.resolve import resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def plan_of(level: str, **overrides: Any) -> Plan:
    return make_plan(resolve(level, overrides)[1])


@pytest.mark.parametrize("level", OPT_LEVELS)
def test_a_plan_holds_no_none_and_no_strings_but_closed_choices(level: str) -> None:
    plan = make_plan(OPT_LEVELS[level])
    values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    choices = {values.pop(name) for name in ("cast_policy", "cast_scope", "optimizer_state")}
    assert choices == {"torch", "thread", "float32"}
    assert not [v for v in (*values.values(), *dataclasses.astuple(plan.scaling)) if v is None or isinstance(v, str)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.cast_model = False  # type: ignore[misc]


def test_the_first_scale_stays_within_the_limits() -> None:
    assert plan_of("O2", min_loss_scale=2.0**20).scaling.init_scale == 2.0**20
    assert plan_of("O2", max_loss_scale=8.0).scaling.init_scale == 8.0
    assert plan_of("O2", init_loss_scale=4.0).scaling.init_scale == 4.0
    assert plan_of("O2", loss_scale=2.0**30).scaling.init_scale == 2.0**30, "limits are for dynamic scaling"
