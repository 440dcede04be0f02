"""Steps that the loop itself leaves out after an overflow: the scale moves all the same."""

from typing import Any

import pytest
import torch
from loops import batches, mlp, mse
from models import dynamic
from torch.optim import SGD

import mpinit

BATCH = batches(1)[0]


def pair(level: str = "O2", most_skips: int = 64, **more: Any) -> tuple[Any, Any]:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, level, **dynamic(level, init=2.0**14, max_consecutive_skips=most_skips), **more)
    return model, optimizer


def backward(model: Any, optimizer: Any, overflows: bool, **more: Any) -> None:
    with mpinit.scale_loss(mse(model, BATCH), optimizer, **more) as scaled_loss:
        (scaled_loss * (float("inf") if overflows else 1.0)).backward()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize("delays", [True, False])
def test_a_loop_that_checks_its_own_norm(level: str, sets_to_none: bool, delays: bool) -> None:
    model, optimizer = pair(level)
    for index in range(6):
        optimizer.zero_grad(set_to_none=sets_to_none)
        backward(model, optimizer, overflows=index < 4, delay_unscale=delays)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            continue
        optimizer.step()
        # Gradients that were set to 0 look like clipped ones, so the first finite step is skipped for the overflow.
        assert mpinit.step_was_skipped(optimizer) == (index == 4 and not sets_to_none)
    assert mpinit.step_counts(optimizer) == ((2, 0) if sets_to_none else (1, 1))
    # A delayed check waits for a step, or for gradients that are None.
    assert mpinit.loss_scale(optimizer) == (2.0**13 if delays and not sets_to_none else 2.0**10)


def test_other_ends_of_gradients_are_no_skipped_steps() -> None:
    model, optimizer = pair()
    backward(model, optimizer, overflows=False)
    optimizer.zero_grad()  # left out for another reason than an overflow
    backward(model, optimizer, overflows=True)
    backward(model, optimizer, overflows=False)  # added up: the step below is the one that is skipped
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (0, 1)
    optimizer.zero_grad()
    backward(model, optimizer, overflows=False)
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 1)


def test_gradients_of_another_optimizers_loss_are_no_steps() -> None:
    """Drop the gradients that a generator's loss leaves on its discriminator."""
    made, judge = mlp(), torch.nn.Linear(1, 1)
    optimizers = [SGD(made.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.1)]
    mpinit.initialize([made, judge], optimizers, "O2", loss_scale=mpinit.DynamicLossScale(init=2.0**14))
    for index in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with mpinit.scale_loss(judge(made(BATCH[0]).mean(1, keepdim=True)).mean(), optimizers[0]) as scaled_loss:
            (scaled_loss * (float("inf") if index == 1 else 1.0)).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        with mpinit.scale_loss(judge(torch.ones(2, 1)).mean(), optimizers[1]) as scaled_loss:
            scaled_loss.backward()
        optimizers[1].step()
    assert [mpinit.step_counts(optimizer) for optimizer in optimizers] == [(2, 1), (3, 0)]
