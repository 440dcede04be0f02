"""The order of step hooks, of one optimizer and of all."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from loops import backward, batches, keywords, mlp, mse
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import mpinit

BATCH = batches(1)[0]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_step_hooks_run_in_torchs_order(level: str) -> None:
    """Run the hooks of all optimizers before its own pre-hooks, and after its own post-hooks."""
    found = [calls_of_hooks(level, is_ours) for is_ours in (True, False)]
    assert found[0] == found[1] and len(found[0]) == 4


@pytest.mark.parametrize("what", ["block", "weight", "gradient", "no gradient"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_write_in_a_pre_hook_counts_in_that_step(level: str, what: str) -> None:
    """Halve a layer, or replace its gradient, in a hook of each step; compare with the same by hand."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.5)
    mpinit.initialize(model, optimizer, **keywords(level))
    (name, weight), *_ = model.named_parameters()
    expected = None

    def halve(*_: Any) -> None:
        nonlocal expected
        values, gradient = model.state_dict()[name], weight.grad.float().clone()
        with torch.no_grad():
            if what == "block":
                with mpinit.float32_weights(model):
                    next(model.parameters()).mul_(0.5)
            elif what == "weight":
                weight.mul_(0.5)
        if what == "no gradient":
            weight.grad, gradient = None, 0 * gradient
        elif what == "gradient":
            weight.grad = weight.grad * 3
            gradient *= 3
        expected = (values if "gradient" in what else values / 2) - 0.5 * gradient

    optimizer.register_step_pre_hook(halve)
    for batch in batches(2):
        optimizer.zero_grad()
        backward(mse(model, batch), optimizer)
        optimizer.step()
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=0, atol=2**-9)


def calls_of_hooks(level: str, is_ours: bool) -> list[str]:
    calls: list[str] = []
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    if is_ours:
        mpinit.initialize(model, optimizer, **keywords(level))
    registers: dict[str, Any] = {
        "own, before": optimizer.register_step_pre_hook,
        "all, before": register_optimizer_step_pre_hook,
        "own, after": optimizer.register_step_post_hook,
        "all, after": register_optimizer_step_post_hook,
    }
    with ExitStack() as stack:
        for name, register in registers.items():
            stack.callback(register(lambda *_, name=name: calls.append(name)).remove)
        loss = mse(model, BATCH)
        backward(loss, optimizer) if is_ours else loss.backward()
        optimizer.step()
    return calls
