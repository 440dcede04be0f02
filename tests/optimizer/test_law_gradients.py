"""A weight's gradient and its master's are one, whichever side somebody changes, and however."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from law_cases import GRADIENT, START, begin, each_mode, entry, is_number, pull
from torch.nn.utils import clip_grad_norm_

import mpinit

EDITED = torch.tensor([[4.0, 0.5, -8.0]])


def on_master_params(model: Any, optimizer: Any) -> Any:
    return next(iter(mpinit.master_params(optimizer)))


def in_groups(model: Any, optimizer: Any) -> Any:
    return entry(optimizer)


def in_model(model: Any, optimizer: Any) -> Any:
    return model.weight


everywhere = pytest.mark.parametrize("where", [on_master_params, in_groups, in_model])


@each_mode
@everywhere
def test_a_gradient_that_was_replaced_is_stepped(dtype: torch.dtype, masters: Any, where: Any) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    parameter = where(model, optimizer)
    parameter.grad = EDITED.to(parameter.grad.dtype, copy=True)
    optimizer.step()
    is_number(model, START - EDITED)


@each_mode
@everywhere
def test_a_gradient_that_was_dropped_is_not_stepped(dtype: torch.dtype, masters: Any, where: Any) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    where(model, optimizer).grad = None
    optimizer.step()
    is_number(model, START)


@each_mode
@everywhere
def test_a_gradient_edited_in_place_is_stepped(dtype: torch.dtype, masters: Any, where: Any) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    where(model, optimizer).grad.mul_(4)
    optimizer.step()
    is_number(model, START - 4 * GRADIENT)


@each_mode
@everywhere
def test_what_is_accumulated_adds_to_the_gradient_that_was_put_there(
    dtype: torch.dtype, masters: Any, where: Any
) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    parameter = where(model, optimizer)
    parameter.grad = EDITED.to(parameter.grad.dtype, copy=True)
    pull(model, optimizer)
    for seen in (model.weight.grad, entry(optimizer).grad):
        assert torch.equal(seen.float(), EDITED + GRADIENT)
    optimizer.step()
    is_number(model, START - (EDITED + GRADIENT))


@each_mode
@everywhere
def test_what_is_accumulated_after_a_gradient_was_dropped_is_all_there_is(
    dtype: torch.dtype, masters: Any, where: Any
) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    where(model, optimizer).grad = None
    pull(model, optimizer, times=2)
    optimizer.step()
    is_number(model, START - 2 * GRADIENT)


@each_mode
@everywhere
def test_what_was_put_there_is_what_clip_grad_norm_clips(dtype: torch.dtype, masters: Any, where: Any) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    parameter = where(model, optimizer)
    parameter.grad = torch.tensor([[0.0, 8.0, 0.0]], dtype=parameter.grad.dtype)
    norm = mpinit.clip_grad_norm_(optimizer, 2.0)
    torch.testing.assert_close(norm.float(), torch.tensor(8.0), rtol=2.0**-7, atol=0.0)
    optimizer.step()
    number = model.state_dict()["weight"]
    torch.testing.assert_close(number, START - torch.tensor([[0.0, 2.0, 0.0]]), rtol=2.0**-7, atol=0.0)


@each_mode
def test_clipping_over_the_groups_clips(dtype: torch.dtype, masters: Any) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer, times=4)
    norm = clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], GRADIENT.norm().item())
    torch.testing.assert_close(norm.float(), 4 * GRADIENT.norm(), rtol=2.0**-7, atol=0.0)
    optimizer.step()
    torch.testing.assert_close(model.state_dict()["weight"], START - GRADIENT, rtol=2.0**-6, atol=2.0**-6)


@each_mode
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("there_is_one", [True, False])
def test_a_gradient_of_any_type_is_assigned_to_a_weight(
    dtype: torch.dtype, masters: Any, given: torch.dtype, there_is_one: bool
) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    if not there_is_one:
        model.weight.grad = None
    model.weight.grad = EDITED.to(given, copy=True)
    optimizer.step()
    is_number(model, START - EDITED)


@each_mode
@pytest.mark.parametrize("look", ["step", "scale_loss", "master_params", "clip_grad_norm_"])
@pytest.mark.parametrize("master_side", [2 * EDITED, None], ids=["replaced", "dropped"])
def test_both_changed_differently_is_refused_by_name(
    dtype: torch.dtype, masters: Any, look: str, master_side: torch.Tensor | None
) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    model.weight.grad = EDITED.to(model.weight.grad.dtype, copy=True)
    entry(optimizer).grad = None if master_side is None else master_side.clone()
    with pytest.raises(RuntimeError, match=r"\bweight\b"):
        if look == "step":
            optimizer.step()
        elif look == "scale_loss":
            pull(model, optimizer)
        elif look == "master_params":
            list(mpinit.master_params(optimizer))
        else:
            mpinit.clip_grad_norm_(optimizer, 1.0)
    is_number(model, START)


@each_mode
def test_both_changed_in_the_same_way_is_one_change(dtype: torch.dtype, masters: Any) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    model.weight.grad = EDITED.to(model.weight.grad.dtype, copy=True)
    entry(optimizer).grad = EDITED.clone()
    optimizer.step()
    is_number(model, START - EDITED)


@each_mode
def test_the_groups_show_gradients_after_a_backward_pass(dtype: torch.dtype, masters: Any) -> None:
    model, optimizer = begin(dtype, masters)
    for total in (1.0, 2.0):
        pull(model, optimizer)
        assert torch.equal(entry(optimizer).grad.float(), total * GRADIENT)
    optimizer.zero_grad()
    assert entry(optimizer).grad is None
