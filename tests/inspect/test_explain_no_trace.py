"""``explain`` leaves no trace: whatever it looks at, and however it fails, everything is as before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import CASES, prepared
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import mpinit
from mpinit import registry
from mpinit.settings.opt_levels import OPT_LEVELS

LEVELS = [None, *OPT_LEVELS]


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


def picture(model: nn.Module, optimizer: torch.optim.Optimizer, *tensors: Tensor) -> list[Any]:
    """Everything there is to see of a model, its optimizer, and torch."""
    parts: list[Any] = []
    for module in model.modules():
        own = vars(module)
        parts += [id(module), module.training, list(own), {k: id(v) for k, v in own.items()}]
        parts += [[(k, id(v)) for k, v in value.items()] for value in own.values() if isinstance(value, dict)]
        parts += [list(value) for value in own.values() if isinstance(value, list)]
    parts.append([value.tolist() for value in model.state_dict().values()])  # the masters' bits, where there are any
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    for tensor in (*model.parameters(), *model.buffers(), *state, *tensors):
        parts += [id(tensor), tensor.dtype, tensor.requires_grad, tensor.data_ptr(), tensor.tolist(), id(tensor.grad)]
        parts.append(None if tensor.grad is None else (tensor.grad.dtype, tensor.grad.tolist()))
    parts += [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    parts += [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()]
    parts += [torch.is_grad_enabled(), len(_get_current_dispatch_mode_stack()), len(registry.live())]
    parts += [dict(module_hooks._global_forward_hooks), dict(module_hooks._global_forward_pre_hooks)]
    parts += [dict(module_hooks._global_forward_hooks_always_called), torch.exp, torch.Tensor.exp, F.softmax]
    return parts


@pytest.mark.parametrize("fails", ["", "forward", "backward", "loss"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("initialised", [False, True], ids=["before", "after"])
def test_everything_is_as_before_bit_for_bit(initialised: bool, level: str | None, fails: str) -> None:
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


def test_hooks_on_gradients_do_not_run() -> None:
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
    assert report.bytes_per_parameter == {"weights": 2, "masters": 0, "gradients": 0, "optimizer state": 0}
