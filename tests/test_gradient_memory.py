"""The memory of large gradients on a CPU: kept for the next ones, never written to, given back by undo."""

from __future__ import annotations

import copy
import weakref

import torch
from torch import nn

import mpinit
from mpinit.gradient_memory import GradientMemory, wants_memory


def trained_once() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O2", cast_model_type="bfloat16", verbosity=0)
    backward(model, optimizer)
    return model, optimizer


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    with mpinit.scale_loss(model(torch.ones(1, 256)).sum() * factor, optimizer) as scaled_loss:
        scaled_loss.backward()


def test_an_old_gradient_lives_until_the_next_has_arrived() -> None:
    model, optimizer = trained_once()
    gradient = model.weight.grad
    assert gradient is not None
    old = weakref.ref(gradient.untyped_storage())
    del gradient
    optimizer.zero_grad()
    assert model.weight.grad is None and old() is not None
    address = old().data_ptr()  # type: ignore[union-attr]
    backward(model, optimizer)
    assert model.weight.grad is not None and model.weight.grad.data_ptr() != address
    mpinit.undo(model)


def test_a_gradient_that_the_user_keeps_is_never_written_to() -> None:
    model, optimizer = trained_once()
    kept, view = model.weight.grad, next(mpinit.master_params(optimizer)).grad
    assert kept is not None and view is not None
    view = view[0]
    for factor in (2.0, 3.0, 4.0):
        optimizer.zero_grad()
        backward(model, optimizer, factor)
        assert kept.eq(1).all() and view.eq(1).all()
        assert model.weight.grad is not None and model.weight.grad.eq(factor).all()
    mpinit.undo(model)


def test_undo_gives_the_memory_back() -> None:
    model, optimizer = trained_once()
    assert model.weight.grad is not None
    old = weakref.ref(model.weight.grad)
    mpinit.undo(model)
    optimizer.zero_grad()
    assert old() is None
    model(torch.ones(1, 256)).sum().backward()
    fresh = model.weight.grad
    assert fresh is not None
    old = weakref.ref(fresh)
    del fresh
    optimizer.zero_grad()
    assert old() is None


def test_a_copy_of_the_model_keeps_nothing() -> None:
    model, _ = trained_once()
    copied = copy.deepcopy(model)
    copied.weight.grad = None
    copied.weight.float().sum().backward()
    old = weakref.ref(copied.weight.grad)
    copied.weight.grad = None
    assert old() is None
    mpinit.undo(model)


def test_small_and_meta_weights_have_none() -> None:
    assert wants_memory(torch.empty(2**15 + 1))
    assert not wants_memory(torch.empty(2**15))
    assert not wants_memory(torch.empty(2**16, device="meta"))


def test_close_takes_the_hook_off() -> None:
    weight = nn.Parameter(torch.ones(3))
    memory = GradientMemory(weight)
    memory.close()
    weight.sum().backward()
    assert memory.gradient is None
