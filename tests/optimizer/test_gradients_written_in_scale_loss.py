"""Writes to gradients inside ``scale_loss``, where they are multiplied by the scale: one warning."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from loops import batches, gradients, mse, same, started
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import mpinit

pytestmark = pytest.mark.device

BATCH, OTHER = batches(2)
WRITTEN = "gradients were written to while they were multiplied by the loss scale, 1024: clip_grad_norm_"


def penalty(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad.add_(parameter.detach(), alpha=0.1)  # type: ignore[union-attr]


WRITES: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: clip_grad_norm_(p, 1.0),
    "norm, one by one": lambda p: clip_grad_norm_(p, 1.0, foreach=False),
    "value": lambda p: clip_grad_value_(p, 1.0),
    "penalty": penalty,
}


@pytest.mark.parametrize("is_accumulated", [False, True])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_write_inside_a_block_is_warned_of_once(level: str, write: str, is_accumulated: bool) -> None:
    model, optimizer = started(level)
    for number in range(3):
        optimizer.zero_grad()
        if is_accumulated:
            with mpinit.scale_loss(mse(model, OTHER), optimizer) as scaled_loss:
                scaled_loss.backward()
        with (
            pytest.warns(UserWarning, match=WRITTEN) if number == 0 else nullcontext() as found,
            mpinit.scale_loss(mse(model, BATCH), optimizer) as scaled_loss,
        ):
            scaled_loss.backward()
            WRITES[write](model.parameters())
        assert found is None or (len(found) == 1 and found[0].filename == __file__)
        optimizer.step()


def post_hook(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


@pytest.mark.parametrize("level", ["O1", "O2", "O2, static", "O5"])
def test_what_autograd_writes_is_not_warned_of(level: str) -> None:
    """Accumulate in one block and over several, with hooks of autograd, and clip behind the block."""
    asked = {"level": level.split(",")[0]} | ({"loss_scale": 128.0} if "static" in level else {})
    model, optimizer = started(**asked)  # type: ignore[arg-type]
    model[0].weight.register_post_accumulate_grad_hook(post_hook)
    model[3].weight.register_hook(lambda gradient: gradient * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            with mpinit.scale_loss(mse(model, BATCH), optimizer) as scaled_loss:
                scaled_loss.backward(retain_graph=True)
                scaled_loss.backward()
            with mpinit.scale_loss(mse(model, OTHER), optimizer) as scaled_loss:
                scaled_loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            with mpinit.scale_loss(mse(model, OTHER), optimizer) as scaled_loss:
                scaled_loss.backward()
            mpinit.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()


@pytest.mark.parametrize("is_error", [False, True])
def test_gradients_are_unscaled_all_the_same(is_error: bool) -> None:
    """Check that a warning that is raised as an error leaves the state complete."""
    found = []
    for clips in (False, True):
        model, optimizer = started()
        with (
            warnings.catch_warnings(),
            pytest.raises(UserWarning, match="written to") if clips and is_error else nullcontext(),
        ):
            warnings.simplefilter("error" if is_error else "ignore")
            with mpinit.scale_loss(mse(model, BATCH), optimizer) as scaled_loss:
                scaled_loss.backward()
                if clips:
                    clip_grad_norm_(model.parameters(), 1e30)
        found.append(gradients(optimizer))
        optimizer.step()
        assert mpinit.step_counts(optimizer) == (1, 0)
    same(*found)
