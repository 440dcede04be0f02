"""Copies of models at O1 and O4: they belong to no session, and compute as a model that was never initialised."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpinit

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


class Norms(nn.Module):
    """A model whose squares overflow float16, and whose norm is float32 by the policy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * 1000).pow(2).sum(-1).sqrt()  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("scope", [True, "model"])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_copy_computes_in_float32_after_undo(level: str, scope: Any, way: str) -> None:
    model, x = Norms(), torch.randn(4, 8)
    want = model(x)
    mpinit.initialize(model, opt_level=level, patch_torch_functions=scope)
    in_16_bit = model(x)
    assert not torch.equal(in_16_bit, want)
    copied = COPIES[way](model)
    # With casts of the whole thread, any model in it has them, initialised or not.
    assert torch.equal(copied(x), in_16_bit if scope is True else want)
    assert torch.equal(model(x), in_16_bit)
    mpinit.undo(model)
    assert torch.equal(copied(x), want)
    assert torch.equal(model(x), want)


def test_a_copy_is_initialised_like_any_other_model() -> None:
    model, x = Norms(), torch.randn(4, 8)
    mpinit.initialize(model, opt_level="O1", patch_torch_functions="model")
    in_16_bit = model(x)
    copied = copy.deepcopy(model)
    mpinit.initialize(copied, opt_level="O1", patch_torch_functions="model")
    assert torch.equal(copied(x), in_16_bit)
