"""What does not fit a 16-bit model is refused by name; sessions do not change each other's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import quietly
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def by_vector(model: Any) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).float(), model.parameters())


def by_data(model: Any) -> None:
    model[1].weight.data = model[1].weight.data.float()


def by_appending(model: Any) -> None:
    model.append(nn.Linear(2, 2))


def by_replacing(model: Any) -> None:
    model[1].weight = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("change", "name"),
    [(by_vector, "0.weight"), (by_data, "1.weight"), (by_appending, "2.weight"), (by_replacing, "1.weight")],
)
def test_a_float32_parameter_in_a_16_bit_model_is_named(change: Callable[[Any], None], name: str) -> None:
    model = quietly(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "O5")
    change(model)
    with pytest.raises(RuntimeError, match=rf"'{name}' is float32 in Sequential.*copy_\(\).*bfloat16.*\"model\""):
        model(torch.ones(1, 2))


def test_an_object_that_is_not_walked_is_named() -> None:
    class Graph:
        x = torch.ones(1, 2)

        def to(self, device: Any) -> Graph:
            raise NotImplementedError

    class Net(nn.Linear):
        def forward(self, graph: Graph) -> torch.Tensor:  # type: ignore[override]
            return super().forward(graph.x)

    with pytest.raises(RuntimeError, match=r"an object of type Graph.*tensors as arguments"):
        quietly(Net(2, 2), "O5")(Graph())


def test_other_errors_are_left_as_they_are() -> None:
    model = quietly(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "O5")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.ones(1, 3))
