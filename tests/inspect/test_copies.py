"""Originals of copies: a forward that runs a module of the original instead of its copy is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpinit

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Closing(nn.Module):
    """A model whose head is a lambda that refers to the model itself, so that a copy's head runs the original's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.head = lambda x: self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.linear(x))  # type: ignore[no-any-return]


def test_closure_over_a_module_of_the_original_is_refused() -> None:
    model = Closing()
    for report in (
        lambda: mpinit.explain(model, X, opt_level="O5"),
        lambda: mpinit.fidelity(model, X),
    ):
        with pytest.raises(
            ValueError, match=r"'norm' of the model itself was run inside mpinit\.\w+, and not the copy"
        ):
            report()
    assert not model.norm.running_mean.any() and not model.norm._forward_pre_hooks


class Shared(nn.Module):
    """A model whose copies share a frozen part with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.teacher(x)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shared":
        copied = Shared()
        copied.linear, copied.teacher = copy.deepcopy(self.linear, memo), self.teacher
        return copied


def test_module_that_copies_share_with_the_original_may_run() -> None:
    assert mpinit.explain(Shared(), X).rows
