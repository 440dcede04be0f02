"""An exception at any line of scale_loss or step: it passes through, and the next iteration is right."""

from __future__ import annotations

import functools
import linecache
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interruptions import PACKAGE, Where, count_runs, raise_at
from loops import backward, batches, gradients, keywords, masters, mse, poison, same
from torch import nn
from torch.optim import SGD, Optimizer

import mpinit
from mpinit.optimizer import backward as passes

# What only switches flags and looks things up, or runs before and after the loop. Everything else is covered.
EXCLUDED = (
    *("amp.py", "registry.py", "checks.py", "cli.py", "checkpoint.py", "plan.py"),
    *("basics/dtypes.py", "basics/logs.py", "basics/patching.py", "basics/trees.py"),
    # In place on a buffer, with nothing in it that allocates: Ctrl-C is held back around it, and nothing else raises.
    "masters/float_split.py",
    *("compat/", "distributed/", "functions/", "inspect/", "model/", "settings/", "torch_internals/"),
)


class Injected(Exception):
    """The exception that comes out of nowhere."""


def lines_of(action: Callable[[], Any]) -> Iterator[Where]:
    """The last run of every line that ``action`` runs."""
    for (name, number), count in count_runs(action, lambda name: not name.startswith(EXCLUDED)).items():
        # Nothing can protect the line that begins the protection.
        if linecache.getline(PACKAGE + name, number).strip() != "try:":
            yield name, number, count


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "O0": keywords("O0"),
    "O1": keywords("O1"),
    "O2": keywords("O2"),
    "O2 static": keywords("O2") | {"loss_scale": 64.0},
    "O2 unscaled": keywords("O2", torch.bfloat16) | {"loss_scale": 1.0},
    "O2 split": keywords("O2", torch.bfloat16) | {"master_weights": "split", "loss_scale": 64.0},
}
DATA = batches(4)
# In every run these fail at each line, and the others at every second one, in turn: masters have lines of their own.
AT_EACH_LINE = ("O2", "O2 split")
LINES = [
    *((name, name in AT_EACH_LINE) for name in CONFIGURATIONS),
    *(pytest.param(name, True, marks=pytest.mark.nightly) for name in CONFIGURATIONS if name not in AT_EACH_LINE),
]


class Loop:
    """One good iteration behind it; then whatever the test does."""

    def __init__(self, configuration: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 3))
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        mpinit.initialize(self.model, self.optimizer, **CONFIGURATIONS[configuration])
        self.iterate(0)

    def loss(self, index: int, bad: bool = False) -> torch.Tensor:
        loss = mse(self.model, DATA[index])
        return poison(loss, self.model[0].bias) if bad else loss

    def iterate(self, index: int, bad: bool = False) -> None:
        self.optimizer.zero_grad()
        backward(self.loss(index, bad), self.optimizer)
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]

    @functools.cached_property
    def twin(self) -> nn.Module:
        """A file's copy: in 16 bit where the model is."""
        return pickle.loads(pickle.dumps(self.model))  # type: ignore[no-any-return]

    def gradient(self, index: int) -> list[torch.Tensor]:
        """What the gradient has to be at the weights as they are, by a copy and without mpinit."""
        weights = list(self.twin.parameters())
        with torch.no_grad():
            for copied, weight in zip(weights, self.model.parameters(), strict=True):
                assert copied.dtype is weight.dtype
                copied.copy_(weight)
        scale = mpinit.loss_scale(self.optimizer)
        found = torch.autograd.grad(mse(self.twin, DATA[index]) * scale, weights)
        return [gradient.float() / scale for gradient in found]

    def check_next_iteration(self) -> None:
        """The next iteration does by the numbers what it should, from wherever the failed one left things."""
        self.optimizer.zero_grad()
        before, expected, scale = self.values(), self.gradient(2), mpinit.loss_scale(self.optimizer)
        buffers = [
            self.optimizer.state[p].get("momentum_buffer") for g in self.optimizer.param_groups for p in g["params"]
        ]
        momenta = [0.9 * b.clone() if b is not None else 0.0 for b in buffers]
        backward(self.loss(2), self.optimizer)
        same(gradients(self.optimizer), self._as_held(expected))
        self.optimizer.step()
        assert not mpinit.step_was_skipped(self.optimizer)
        for old, new, momentum, gradient in zip(before, self.values(), momenta, expected, strict=True):
            torch.testing.assert_close(new, old - 0.1 * (momentum + gradient), rtol=1e-6, atol=1e-7)
        for weight, value in zip(self.model.parameters(), self.values(), strict=True):
            assert weight.dtype == torch.float32 or (weight - value).abs().max() <= value.abs().max() * 2**-8
        # An overflow of the failed iteration may count only now.
        assert mpinit.loss_scale(self.optimizer) in (scale, scale / 2)

    def _as_held(self, expected: list[torch.Tensor]) -> list[torch.Tensor]:
        return [g.to(p.grad.dtype) for g, p in zip(expected, mpinit.master_params(self.optimizer), strict=True)]  # type: ignore[union-attr]


def inject_everywhere(
    configuration: str, prepare: Callable[[Loop], Callable[[], Any]], each: bool
) -> Iterator[tuple[Where, Loop]]:
    """For each line of what ``prepare`` returns, or every second: a loop in which that line has just failed.

    A loop that has come through is used again for the next lines: what it does after a failure must bear another.
    """
    loop, used = Loop(configuration), 0
    lines = list(lines_of(prepare(Loop(configuration))))
    for line in lines if each else lines[list(CONFIGURATIONS).index(configuration) % 2 :: 2]:
        before = mpinit.loss_scale(loop.optimizer)
        if not fails(line, prepare(loop)):
            # A line of a second iteration alone.
            loop, used = Loop(configuration), 0
            before = mpinit.loss_scale(loop.optimizer)
            assert fails(line, prepare(loop)), line
        assert mpinit.loss_scale(loop.optimizer) in (before, before / 2), "at most one overflow"
        yield line, loop
        used += 1
        if used == 16 or 1.0 < mpinit.loss_scale(loop.optimizer) < 64.0:
            mpinit.undo(loop.model)
            loop, used = Loop(configuration), 0


def fails(line: Where, action: Callable[[], Any]) -> bool:
    """Whether the line came, and the failure there came out."""
    try:
        fired = raise_at(line, action, Injected)
    except Injected:
        return True
    assert not fired, f"a failure at {line} was swallowed"
    return False


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize(("configuration", "each"), LINES)
def test_a_failing_iteration_leaves_the_next_one_right(configuration: str, bad: bool, each: bool) -> None:
    if bad and "dynamic" not in (CONFIGURATIONS[configuration].get("loss_scale"),):
        pytest.skip("static scaling does not look for overflows")
    count = 0
    for line, loop in inject_everywhere(configuration, lambda loop: lambda: loop.iterate(1, bad), each):
        count += 1
        try:
            loop.check_next_iteration()
        except Exception as error:
            raise AssertionError(f"after a failure at {line}") from error
    assert count > (40 if each else 20)


@pytest.mark.parametrize(("configuration", "each"), LINES)
def test_a_failing_backward_leaves_gradients_of_whole_micro_batches(configuration: str, each: bool) -> None:
    """Those from before the failed pass, those with it, or none: never a mixture, never a scaled one."""
    for line, loop in inject_everywhere(configuration, _second_micro_batch, each):
        each = [[g.clone() for g in loop.gradient(index)] for index in (1, 2, 3)]
        backward(loop.loss(3), loop.optimizer)
        found = [g for g in gradients(loop.optimizer) if g is not None]
        allowed = [[sum(parts) for parts in zip(*chosen, strict=True)] for chosen in (each[::2], each, each[2:])]
        assert any(
            all(torch.allclose(a.float(), b, rtol=0.02, atol=1e-3) for a, b in zip(found, total, strict=True))
            for total in allowed
        ), f"after a failure at {line}"


def _second_micro_batch(loop: Loop) -> Callable[[], Any]:
    loop.optimizer.zero_grad()
    backward(loop.loss(1), loop.optimizer)
    loss = loop.loss(2)
    return lambda: backward(loss, loop.optimizer)


@pytest.mark.parametrize("configuration", AT_EACH_LINE)
def test_a_failing_step_with_a_closure_leaves_the_next_iteration_right(configuration: str) -> None:
    def prepare(loop: Loop) -> Callable[[], Any]:
        def closure() -> torch.Tensor:
            loop.optimizer.zero_grad()
            loss = loop.loss(1)
            backward(loss, loop.optimizer)
            return loss

        return lambda: loop.optimizer.step(closure)

    for line, loop in inject_everywhere(configuration, prepare, each=True):
        try:
            loop.check_next_iteration()
        except Exception as error:
            raise AssertionError(f"after a failure at {line}") from error


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_an_exception_in_the_body_puts_back_what_was_there(configuration: str) -> None:
    loop = Loop(configuration)
    loop.optimizer.zero_grad()
    backward(loop.loss(1), loop.optimizer)
    before, scale = gradients(loop.optimizer), mpinit.loss_scale(loop.optimizer)
    with pytest.raises(Injected), mpinit.scale_loss(loop.loss(2), loop.optimizer):
        raise Injected
    same(gradients(loop.optimizer), before)
    assert mpinit.loss_scale(loop.optimizer) == scale
    loop.check_next_iteration()


@pytest.mark.parametrize("configuration", [name for name in CONFIGURATIONS if name not in ("O0", "O2 unscaled")])
def test_an_exception_after_backward_leaves_nothing_scaled(configuration: str) -> None:
    loop = Loop(configuration)
    loop.optimizer.zero_grad()
    backward(loop.loss(1), loop.optimizer)
    before = gradients(loop.optimizer)
    with pytest.raises(Injected), mpinit.scale_loss(loop.loss(2), loop.optimizer) as scaled:
        scaled.backward()
        raise Injected
    same(gradients(loop.optimizer), before)
    loop.optimizer.step()
    loop.check_next_iteration()


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_step_that_fails_half_way_leaves_weights_and_masters_together(configuration: str) -> None:
    class Half(SGD):
        fails = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.fails:
                first = next(p for p in self.param_groups[0]["params"] if p.grad is not None)
                first.add_(1.0)
                raise Injected
            return super().step(closure)

    loop = Loop("O0")
    mpinit.undo(loop.model)
    loop.optimizer = Half(loop.model.parameters(), lr=0.1, momentum=0.9)
    if "split" in configuration:
        loop.optimizer.steps_per_parameter = True  # type: ignore[attr-defined]
    mpinit.initialize(loop.model, loop.optimizer, **CONFIGURATIONS[configuration])
    loop.iterate(0)
    before = loop.values()
    Half.fails = True
    with pytest.raises(Injected):
        loop.iterate(1)
    Half.fails = False
    torch.testing.assert_close(loop.values()[0], before[0] + 1.0)
    loop.check_next_iteration()


def test_a_failing_check_leaves_both_optimizers_without_half_done_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = nn.Linear(6, 3), nn.Linear(6, 3)
    opt1, opt2 = SGD(first.parameters(), lr=1.0), SGD(second.parameters(), lr=1.0)
    mpinit.initialize([first, second], [opt1, opt2], **keywords("O2"))
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Injected
        return check(*args)

    check = passes.unscale_and_check_
    monkeypatch.setattr(passes, "unscale_and_check_", failing)
    with pytest.raises(Injected):
        backward(mse(first, DATA[0]) + mse(second, DATA[0]), [opt1, opt2])
    assert gradients(opt1) == gradients(opt2) == [None, None]
    before = [*masters(opt1), *masters(opt2)]
    for optimizer in (opt1, opt2):
        optimizer.step()
    same([*masters(opt1), *masters(opt2)], before)
