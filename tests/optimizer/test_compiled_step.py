"""compile_step=True: the same training, compiled once, whatever the learning rate does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import mpinit

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def run(compile_step: bool, **kind: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, **kind)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    mpinit.initialize(model, optimizer, "O2", compile_step=compile_step, verbosity=0)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        with mpinit.scale_loss(model(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**6)
    weights = [parameter.detach() for parameter in model.parameters()]
    masters = [parameter.detach() for parameter in mpinit.master_params(optimizer)]
    assert all(torch.equal(w, m.half()) for w, m in zip(weights, masters, strict=True))
    return masters


@pytest.mark.long
def test_compiled_and_eager_steps_agree_and_nothing_is_compiled_twice() -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = run(True)
    graphs = counters["stats"]["unique_graphs"]
    for ours, eager in zip(compiled, run(False), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    # Adam compiles once for its first step, which makes the state, and once for all others.
    assert 1 <= graphs <= 2


def test_an_optimizer_that_asks_for_foreach_compiles_too() -> None:
    torch._dynamo.reset()
    for ours, eager in zip(run(True, foreach=True), run(False, foreach=True), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


def test_split_masters_have_no_one_step_to_compile() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"compile_step=True contradicts master_weights"):
        mpinit.initialize(model, torch.optim.SGD(model.parameters()), "O5", master_weights="split", compile_step=True)
