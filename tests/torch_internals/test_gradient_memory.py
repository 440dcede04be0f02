"""Memory of large gradients on a CPU: one block is kept between steps, and nothing else is."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from mpinit.torch_internals.allocator import highest, large_on_cpu
from torch import nn

import mpinit


def trained_once(width: int = 256, **more: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O2", cast_model_type="bfloat16", verbosity=0, **more)
    backward(model, optimizer)
    return model, optimizer


def backward(model: nn.Sequential, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    with mpinit.scale_loss(model(torch.ones(1, model[0].in_features)).sum() * factor, optimizer) as scaled_loss:
        scaled_loss.backward()


def storages(model: nn.Module) -> list[Any]:
    return [weakref.ref(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None]


def alive(references: list[Any]) -> int:
    return sum(reference() is not None for reference in references)


def test_one_of_the_last_gradients_stays_until_the_next_have_come() -> None:
    for more in ({}, {"loss_scale": "dynamic"}):
        model, optimizer = trained_once(**more)
        first = storages(model)
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        assert (len(first), alive(first)) == (4, 1)
        backward(model, optimizer)
        assert alive(first) == 0
        mpinit.undo(model)


def test_accumulation_keeps_what_was_summed_and_no_more() -> None:
    # A width of its own: what other tests have left does not count.
    model, optimizer = trained_once(width=263, loss_scale="dynamic")
    backward(model, optimizer)
    gc.collect()
    large = {
        thing.untyped_storage().data_ptr()
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor)
        and not nn.parameter.is_lazy(thing)
        and (thing.dtype, thing.shape) == (torch.float32, (263, 263))
    }
    assert len(large) == 4 + 4, "masters and gradients"
    mpinit.undo(model)


def test_a_gradient_that_the_user_keeps_is_never_written_to() -> None:
    model, optimizer = trained_once()
    kept = [p.grad for p in model.parameters()]
    before = [g.clone() for g in kept if g is not None]
    for factor in (2.0, 3.0):
        optimizer.zero_grad()
        backward(model, optimizer, factor)
        assert all(map(torch.equal, before, kept))
    mpinit.undo(model)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_graph_of_gradients_is_let_go() -> None:
    model, optimizer = trained_once()
    optimizer.zero_grad()
    hidden = torch.ones(1, 256, requires_grad=True) * 1
    reference = weakref.ref(hidden)
    with mpinit.scale_loss(model(hidden).square().sum(), optimizer) as scaled_loss:
        scaled_loss.backward(create_graph=True)
    del hidden, scaled_loss
    optimizer.zero_grad()
    gc.collect()
    assert reference() is None
    mpinit.undo(model)


def test_undo_gives_the_memory_back() -> None:
    model, optimizer = trained_once()
    last = storages(model)
    mpinit.undo(model)
    optimizer.zero_grad()
    assert alive(last) == 0


def test_small_and_meta_weights_are_left_out() -> None:
    assert large_on_cpu([torch.empty(2**15), torch.empty(2**15 + 1), torch.empty(2**16, device="meta")]) == [1]


def test_the_highest_block() -> None:
    both = torch.ones(8)
    low, high = both[:4], both[4:]
    found = highest([None, high, low, torch.eye(2).to_sparse()])
    assert found is not None and found.data_ptr() == high.data_ptr()
    assert highest([None]) is None
