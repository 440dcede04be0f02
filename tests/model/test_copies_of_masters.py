"""Copies of initialised models, and averages: float32 models with the masters' bits, outside of every session."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from averaged_nets import KINDS, masters_of, start, step
from torch import nn

import mpinit


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_model_or_a_part_has_the_masters_bits_and_no_session(kind: str) -> None:
    model, optimizer = start(kind)
    step(model, optimizer)
    for part in (model, model.first):
        twin = copy.deepcopy(part)
        assert {type(tensor) for tensor in twin.parameters()} == {nn.Parameter}
        assert {tensor.dtype for tensor in twin.parameters()} == {torch.float32}
        assert all(torch.equal(twin.state_dict()[name], value) for name, value in part.state_dict().items())
        assert next(twin.half().parameters()).dtype is torch.float16, "a copy may be converted"
    twin = copy.deepcopy(model)
    assert not twin.frozen.requires_grad
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    mpinit.initialize(twin, optimizer, "O2", verbosity=0)
    step(twin, optimizer)


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
            mean[name].lerp_(value, 0.1) if value.is_floating_point() else mean[name].copy_(value)
        for name, master in masters_of(model).items():
            # In float64: what is left between the two is the average's own rounding.
            expected[name] = expected[name].double() * 0.9 + master.double() * 0.1
    for name, parameter in average.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name].float(), rtol=2e-6, atol=2e-7)
    model.load_state_dict(average.state_dict())
    assert torch.equal(masters_of(model)["first.weight"], average.first.weight)


def test_tied_weights_stay_tied_in_a_copy() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5", verbosity=0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        assert twin[0].weight is twin[1].weight
        assert twin[0].weight.dtype is torch.float32


def test_a_module_with_a_deepcopy_of_its_own() -> None:
    class Own(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Own:
            twin = Own(self.in_features, self.out_features)
            twin.weight = copy.deepcopy(self.weight, memo)
            twin.bias = copy.deepcopy(self.bias, memo)
            return twin

    model = nn.Sequential(Own(3, 3), nn.Linear(3, 3))
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5", verbosity=0)
    twin = copy.deepcopy(model)
    assert type(twin[0]) is Own
    assert torch.equal(twin[0].weight, model.state_dict()["0.weight"])
