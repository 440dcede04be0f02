"""After every tool, also one that an exception stopped half way, everything is bit for bit as it was."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loops import backward, batches, mlp, mse, start
from models import CASES, prepared
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import mpinit
from mpinit import registry
from mpinit.settings.opt_levels import OPT_LEVELS

LEVELS = [None, "O0", "O1", "O2", "O3"]


class Net(nn.Module):
    """With dropout, running statistics and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(dropout=0.3, batchnorm=True)
        self.register_buffer("mask", torch.tensor(-1e4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + (self.mask * 0).to(x.dtype)  # type: ignore[no-any-return]


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What training goes on with."""
    values = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    values += [value for state in optimizer.state.values() for value in state.values()]
    parts: list[Any] = [repr(v.tolist()) if isinstance(v, Tensor) else v for v in values]
    parts += [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    if registry.of(optimizer):
        parts += [mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer)]
    return [*parts, torch.get_rng_state().tolist()]


def picture(model: nn.Module, optimizer: torch.optim.Optimizer, *tensors: Tensor) -> list[Any]:
    """Everything there is to see of a model, its optimizer, and torch."""
    parts = numbers(model, optimizer)
    for module in model.modules():
        own = vars(module)
        parts += [id(module), module.training, list(own), {k: id(v) for k, v in own.items()}]
        parts += [[(k, id(v)) for k, v in value.items()] for value in own.values() if isinstance(value, dict)]
        parts += [list(value) for value in own.values() if isinstance(value, list)]
    parts += [sorted(vars(optimizer)), [id(p) for group in optimizer.param_groups for p in group["params"]]]
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    for tensor in (*model.parameters(), *model.buffers(), *state, *tensors):
        parts += [id(tensor), tensor.dtype, tensor.requires_grad, tensor.data_ptr(), repr(tensor.tolist())]
        parts += [id(tensor.grad), None if tensor.grad is None else (tensor.grad.dtype, repr(tensor.grad.tolist()))]
    parts += [random.getstate(), np.random.get_state()[1].tolist(), logging.getLogger("mpinit").level]
    parts += [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()]
    parts += [torch.is_grad_enabled(), len(_get_current_dispatch_mode_stack()), len(registry.live())]
    parts += [dict(module_hooks._global_forward_hooks), dict(module_hooks._global_forward_pre_hooks)]
    parts += [dict(module_hooks._global_forward_hooks_always_called)]
    return [*parts, torch.exp, Tensor.exp, Tensor.__add__, F.softmax, F.linear]


def build(level: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    if level is None:
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        mse(model, batches(1)[0]).backward()
        optimizer.step()
        return model, optimizer
    # In plain float16 Adam divides by an epsilon of 0.
    optimizer = start(model, level, make=None if level == "O3" else lambda p: torch.optim.Adam(p, lr=0.01))
    for batch in batches(2):
        optimizer.zero_grad()
        backward(mse(model, batch), optimizer)
        optimizer.step()
    return model, optimizer


class Stop(Exception):
    """Half way."""


def failing(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    calls = []

    def run(*args: Any) -> Any:
        calls.append(1)
        result = function(*args)
        if len(calls) > after:
            raise Stop
        return result

    return run


def whole_step(model: Any, optimizer: Any) -> torch.Tensor:
    """A step as a training loop has it."""
    optimizer.zero_grad()
    loss = mse(model, batches(1)[0])
    backward(loss, optimizer)
    optimizer.step()
    return loss


@pytest.mark.parametrize("step", [lambda m, o: mse(m, batches(1)[0]), whole_step], ids=["loss", "whole step"])
@pytest.mark.parametrize("level", LEVELS)
def test_suggest_leaves_everything(level: str | None, step: Callable[..., Any]) -> None:
    model, optimizer = build(level)
    before = picture(model, optimizer)
    found = mpinit.suggest(model, optimizer, step)
    assert found.runs
    assert picture(model, optimizer) == before
    for after in (0, 1):
        with pytest.raises(Stop):
            mpinit.suggest(model, optimizer, failing(step, after))
        assert picture(model, optimizer) == before


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_reports_and_histograms_leave_everything(level: str) -> None:
    model, optimizer = build(level)
    before = picture(model, optimizer)
    mpinit.gradient_histogram(optimizer)
    with pytest.raises(ValueError):
        mpinit.gradient_histogram(optimizer, "none")
    assert picture(model, optimizer) == before
    backward(mse(model, batches(1)[0]) * float("inf"), optimizer)
    if level in ("O1", "O2"):
        optimizer.step()
    before = picture(model, optimizer)
    replays = (lambda: mse(model, batches(1)[0]), failing(lambda: mse(model, batches(1)[0]), 0))
    mpinit.overflow_report(optimizer)
    mpinit.overflow_report(optimizer, replay=replays[0])
    with pytest.raises(Stop):
        mpinit.overflow_report(optimizer, replay=replays[1])
    assert picture(model, optimizer) == before


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_run_that_is_watched_is_the_run_without(level: str) -> None:
    """Watching, History and stalled: training goes on to the same bits."""
    found = []
    for watched in (False, True):
        torch.manual_seed(3)
        model, optimizer = build(level)
        attributes = [sorted(vars(each)) for each in (*model.modules(), optimizer)]
        if watched:
            history = mpinit.History(optimizer)
            mpinit.stalled(optimizer, start=True)
            with mpinit.watch_overflow(model):
                whole_step(model, optimizer)
            mpinit.stalled(optimizer)
            history.close()
        else:
            whole_step(model, optimizer)
        assert [sorted(vars(each)) for each in (*model.modules(), optimizer)] == attributes
        found.append(numbers(model, optimizer))
        mpinit.undo(model)
    assert found[0] == found[1]


class Leaving(nn.Module):
    """Leaves traces wherever a module can, and fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails = fails
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.log: list[int] = []
        self.cache: dict[str, Tensor] = {}
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        self.count += 1
        self.log.append(1)
        self.cache["x"] = x
        self.calls = self.calls + 1
        self.norm.eval() if self.count % 2 else self.norm.train()
        with torch.no_grad():
            self.last.weight.add_(1)
            self.last.bias.data = torch.ones(4, dtype=self.last.bias.dtype)
        self.new = nn.Parameter(torch.ones(1))
        random.random(), np.random.rand()
        x = F.dropout(self.norm(self.first(x)), 0.5)
        torch.set_autocast_enabled("cpu", not torch.is_autocast_enabled("cpu"))
        if self.fails == "forward":
            raise ValueError("on purpose")
        if self.fails == "backward":
            x = Failing.apply(x)
        return self.last(x.float().to(self.last.weight.dtype))


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("on purpose")


@pytest.mark.parametrize("fails", ["", "forward", "backward", "loss"])
@pytest.mark.parametrize("level", [None, *OPT_LEVELS])
@pytest.mark.parametrize("initialised", [False, True], ids=["before", "after"])
def test_explain_leaves_everything(initialised: bool, level: str | None, fails: str) -> None:
    model = Leaving(fails)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if initialised and level is not None:
        mpinit.initialize(model, optimizer, level, verbosity=0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1 / 3, dtype=parameter.grad_dtype)
    optimizer.step() if not initialised or level is None else None
    x = torch.randn(3, 4, requires_grad=True)
    x.grad = torch.ones(3, 4)
    batch = x.detach().requires_grad_(False)
    before = picture(model, optimizer, x, batch)
    scale = mpinit.loss_scale(optimizer) if initialised and level is not None else None

    def loss(output: Tensor) -> Tensor:
        if fails == "loss":
            raise ValueError("on purpose")
        return output.float().square().mean()

    def run() -> None:
        mpinit.explain(model, batch, loss=loss, opt_level=None if initialised else level)

    if fails:
        with pytest.raises(ValueError, match="on purpose"):
            run()
    else:
        run()
    assert picture(model, optimizer, x, batch) == before
    if scale is not None:
        assert mpinit.loss_scale(optimizer) == scale
        mpinit.undo(model)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_training_goes_on_as_if_it_had_not_been_looked_at(level: str) -> None:
    losses = []
    for looks in (False, True):
        case = CASES["cnn"]
        model, x, loss = prepared(case)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        mpinit.initialize(model, optimizer, level, verbosity=0)
        found = []
        for _ in range(3):
            if looks:
                mpinit.explain(model, x, loss=loss)
            optimizer.zero_grad()
            value = loss(model(x))
            with mpinit.scale_loss(value, optimizer) as scaled_loss:
                scaled_loss.backward()
            if looks:
                mpinit.explain(model, x, loss=loss)
            optimizer.step()
            found.append(value.item())
        losses.append((found, [value.tolist() for value in model.state_dict().values()]))
        mpinit.undo(model)
    assert losses[0] == losses[1]


def test_sparse_inputs_are_left_as_they_are() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(x, self.weight)

    x = torch.eye(4).to_sparse()
    report = mpinit.explain(Product(), x, loss=torch.sum)
    assert {row.phase for row in report.rows} == {"forward", "backward"}
    assert torch.equal(x.to_dense(), torch.eye(4))


def test_hooks_that_step_in_the_backward_pass_wait() -> None:
    model = nn.Linear(2, 2)
    called = []
    handle = model.weight.register_post_accumulate_grad_hook(lambda p: called.append(p))
    mpinit.explain(model, torch.ones(1, 2), loss=torch.sum)
    assert called == []
    model(torch.ones(1, 2)).sum().backward()
    assert len(called) == 1
    handle.remove()


def test_frozen_models_and_losses_without_gradients_run_forward() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    report = mpinit.explain(model, torch.ones(1, 2), loss=torch.sum, opt_level="O3")
    assert {row.phase for row in report.rows} == {"forward"}
    assert report.bytes_per_parameter["O2"] == {"weights": 2, "masters": 0, "gradients": 0, "optimizer state": 0}
