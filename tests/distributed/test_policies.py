"""FSDP's policies, which may differ from parameter to parameter of a group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mpinit.distributed import sharding


def entry(name: str, asked: torch.dtype | None) -> Any:
    policy = SimpleNamespace(param_dtype=asked)
    return SimpleNamespace(sharded_param=nn.Parameter(torch.ones(2)), _param_fqn=name, mp_policy=policy)


@pytest.mark.parametrize("place", [0, 1])
def test_what_a_policy_asks_for_any_parameter_is_not_overruled(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype | None] = [torch.bfloat16, torch.bfloat16]
    group = SimpleNamespace(fsdp_params=[entry("a", asked[0]), entry("b", asked[1])])
    monkeypatch.setattr(sharding, "_groups", lambda model: [group])
    targets = {each.sharded_param: torch.bfloat16 for each in group.fsdp_params}
    sharding.check_groups([nn.Identity()], targets)
    group.fsdp_params[place].mp_policy.param_dtype = torch.float32
    with pytest.raises(ValueError, match=f"torch.float32.*{'ab'[place]}.*torch.bfloat16"):
        sharding.check_groups([nn.Identity()], targets)
