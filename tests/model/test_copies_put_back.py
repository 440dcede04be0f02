"""Copies of parts that are put back into the model: they are float32, as copies are."""

import copy
from typing import Any

import pytest
import torch
from loops import backward
from torch import nn
from torch.optim import SGD

import mpinit

KINDS: dict[str, dict[str, Any]] = {
    "model": {"opt_level": "O5", "master_weights": "model"},
    "model in float16": {"opt_level": "O2", "master_weights": "model", "loss_scale": 128.0},
}


@pytest.mark.parametrize("place", [1, "1.0"], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_copy_of_a_part_put_back_trains_as_in_float32(kind: str, place: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **KINDS[kind])
    x = torch.randn(8, 4)
    name = str(place)
    copied = copy.deepcopy(model.get_submodule(name))
    model.set_submodule(name, copied)
    optimizer.param_groups[0]["params"] = list(model.parameters())

    reference = copy.deepcopy(model)
    by_hand = SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        for net, own in ((model, optimizer), (reference, by_hand)):
            own.zero_grad()
            loss = net(x).square().mean()
            backward(loss, own) if net is model else loss.backward()
            own.step()
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.float32}
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[key], rtol=0.02, atol=0.01)
    assert all(parameter.grad is not None for parameter in copied.parameters())


@pytest.mark.parametrize("more", [{}, {"master_weights": "split"}], ids=str)
def test_copy_put_back_beside_masters_is_refused_with_way_out(more: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", **more)
    model[1] = copy.deepcopy(model[1])
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(RuntimeError, match=r"\.to\(torch\.bfloat16\)"):
        model(torch.randn(8, 4))
    model[1].to(torch.bfloat16)
    backward(model(torch.randn(8, 4)).square().mean(), optimizer)
    optimizer.step()
