"""The order of step hooks, of one optimizer and of all."""

import threading
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


@pytest.mark.parametrize("what", ["master", "entry", "block", "weight", "gradient", "no gradient"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_write_in_a_pre_hook_counts_in_that_step(level: str, what: str) -> None:
    """Halve a layer, or replace its gradient, in a hook of each step; compare with the same by hand."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.5)
    mpinit.initialize(model, optimizer, **keywords(level))
    (name, weight), *_ = model.named_parameters()
    (master, *_) = mpinit.master_params(optimizer)
    expected = None

    def halve(*_: Any) -> None:
        nonlocal expected
        values, gradient = model.state_dict()[name], weight.grad.float().clone()
        with torch.no_grad():
            if what == "master":
                master.mul_(0.5)
            elif what == "entry":
                model.state_dict()[name].mul_(0.5)
            elif what == "block":
                with mpinit.float32_weights(model):
                    next(model.parameters()).mul_(0.5)
            elif what == "weight":
                weight.mul_(0.5)
        if what == "no gradient":
            master.grad, gradient = None, 0 * gradient
        elif what == "gradient":
            master.grad = master.grad * 3
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


class Slow(SGD):
    """An optimizer whose step waits inside for events."""

    begun, waits_for = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> Any:
        self.begun.set()
        assert self.waits_for.wait(20)
        return super().step(closure)


def test_hooks_of_all_optimizers_survive_steps_of_two_threads() -> None:
    """Run them in both steps, which overlap, and in every step after them."""
    calls: list[Any] = []
    ready, over = threading.Event(), threading.Event()
    optimizers: list[Any] = []
    for begun, waits_for in ((threading.Event(), ready), (ready, over)):
        model = mlp()
        optimizer = Slow(model.parameters(), lr=0.1)
        optimizer.begun, optimizer.waits_for = begun, waits_for
        mpinit.initialize(model, optimizer, **keywords("O2"))
        backward(mse(model, BATCH), optimizer)
        optimizers.append(optimizer)
    first, second = optimizers

    def step_second() -> None:
        assert first.begun.wait(20)
        second.step()

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(lambda each, *_: calls.append((each, "before"))).remove)
        stack.callback(register_optimizer_step_post_hook(lambda each, *_: calls.append((each, "after"))).remove)
        other = threading.Thread(target=step_second)
        other.start()
        first.step()
        over.set()
        other.join()
        assert sorted(name for each, name in calls if each is first) == ["after", "before"]
        assert sorted(name for each, name in calls if each is second) == ["after", "before"]
        stray = SGD([weight for group in first.param_groups for weight in group["params"]], lr=0.1)
        with pytest.raises(RuntimeError, match=r"pass the optimizer to mpinit\.initialize"):
            stray.step()
        plain = SGD(mlp().parameters(), lr=0.1)
        plain.step()
        assert calls[-2:] == [(plain, "before"), (plain, "after")]
