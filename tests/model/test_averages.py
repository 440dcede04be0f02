"""Averages of initialised models: a deepcopy is float32, and averages state dicts, which hold the masters."""

from __future__ import annotations

import copy

import pytest
import torch
from averaged_nets import KINDS, masters_of, start, step

DECAY = 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_a_moving_average_of_state_dicts_is_one_of_the_masters(kind: str) -> None:
    model, optimizer = start(kind)
    step(model, optimizer)
    average = copy.deepcopy(model)
    expected = masters_of(model)
    for _ in range(5):
        step(model, optimizer)
        mean = average.state_dict()
        for name, value in model.state_dict().items():
            mean[name].lerp_(value, 1 - DECAY) if value.is_floating_point() else mean[name].copy_(value)
        for name, master in masters_of(model).items():
            # In float64: what is left between the two is the average's own rounding.
            expected[name] = expected[name].double() * DECAY + master.double() * (1 - DECAY)
    for name, parameter in average.named_parameters():
        assert type(parameter) is torch.nn.Parameter
        assert parameter.dtype is torch.float32
        torch.testing.assert_close(parameter.detach(), expected[name].float(), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_goes_back_into_the_model(kind: str) -> None:
    model, optimizer = start(kind)
    average = copy.deepcopy(model)
    step(model, optimizer)
    model.load_state_dict(average.state_dict())
    assert torch.equal(masters_of(model)["first.weight"], average.first.weight)
    with torch.no_grad():
        for theirs, ours in zip(model.parameters(), average.parameters(), strict=True):
            theirs.copy_(ours * 2)
    torch.testing.assert_close(model.first.weight.float(), average.first.weight.detach() * 2, rtol=1e-2, atol=1e-6)
