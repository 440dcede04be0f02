"""Buffers that share memory with other tensors are refused, because casts would separate them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import LEVELS, Parts
from torch import Tensor, nn

import mpinit


def run(self: Any, x: Tensor) -> Tensor:
    return self.layer(x) + self.other.sum()


def model_with(share: Callable[[Any], Tensor]) -> Any:
    model = Parts(run, layer=nn.Linear(4, 4), bank=nn.Buffer(torch.arange(8.0)))
    model.register_buffer("other", share(model))
    return model


SHARES = {
    "bank": lambda model: model.bank[2:],
    "layer.weight": lambda model: model.layer.weight.detach(),
    "layer.bias": lambda model: model.layer.bias.data[1:2].expand(4),
}


@pytest.mark.parametrize("kind", ["O2", "O3", "split", "model"])
@pytest.mark.parametrize("name", SHARES)
def test_buffer_in_the_memory_of_another_tensor_is_refused(name: str, kind: str) -> None:
    model = model_with(SHARES[name])
    with pytest.raises(ValueError, match=rf"'other' shares memory with '{name}'.*keep_fp32=\['other', '{name}'\]"):
        mpinit.initialize(model, **LEVELS[kind])
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


def test_shared_buffers_that_stay_float32_follow_each_other() -> None:
    model = mpinit.initialize(model_with(SHARES["bank"]), opt_level="O5", keep_fp32=["bank", "other"])
    model.bank.fill_(3.0)
    assert model.other.eq(3.0).all() and model.other.dtype is torch.float32


@pytest.mark.parametrize("share", [lambda model: model.bank, lambda model: torch.zeros(8).copy_(model.bank)])
def test_one_buffer_in_two_places_and_copies_are_cast(share: Callable[[Any], Tensor]) -> None:
    model = mpinit.initialize(model_with(share), opt_level="O5")
    assert model.other.dtype is torch.bfloat16


def test_buffers_that_are_other_parts_of_one_memory_are_cast() -> None:
    model = Parts(run, layer=nn.Linear(4, 4))
    for name, part in zip(("real", "imaginary", "other"), torch.randn(4, 3).unbind(1), strict=True):
        model.register_buffer(name, part)
    mpinit.initialize(model, opt_level="O5")
    assert {buffer.dtype for buffer in model.buffers()} == {torch.bfloat16}
