"""An optimizer's options are looked at before a step only where it is stepped in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpinit
from mpinit.optimizer import switches


class Own(torch.optim.SGD):
    """None of torch's, so that it has to be tried."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(("masters", "looks"), [(True, False), ("split", True)])
def test_options_are_looked_at_only_for_steps_in_parts(
    masters: Any, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    optimizer = Own(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", master_weights=masters, verbosity=0)
    seen: list[Any] = []
    real = switches.switched_on
    monkeypatch.setattr(switches, "switched_on", lambda one: seen.append(one) or real(one))
    with mpinit.scale_loss(model(torch.ones(2, 4)).square().mean(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert bool(seen) is looks
