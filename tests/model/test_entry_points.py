"""Calls of methods other than forward that are named as entry points."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from autoencoder import F16, F32, LEVELS, Autoencoder, by_hand
from models import quietly
from torch import Tensor, nn

import mpinit


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Autoencoder()
        self.offset = nn.Parameter(torch.ones(4))

    @staticmethod
    def double(x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(x)

    def classify(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """What forward does."""
        assert x.dtype is self.offset.dtype
        return self.backbone(x) + (self.offset if shift is None else shift)

    def embed(self, x: Tensor) -> dict[str, Tensor]:
        assert x.dtype is self.offset.dtype
        return {"embedded": self.backbone.encoder(x) + self.offset}


@pytest.mark.parametrize("level", [*LEVELS, "O0"])
def test_entry_points_have_their_inputs_and_outputs_cast(level: str) -> None:
    model = Classifier()
    quietly(model, level, entry_points=["embed", "backbone.forward_features"])
    dtype = LEVELS.get(level, F32)
    x = torch.randn(3, 4)
    assert model(x).dtype is F32
    assert torch.equal(model.embed(x)["embedded"], (by_hand(model.backbone, x, dtype).to(dtype) + model.offset).float())
    assert torch.equal(model.backbone.forward_features(x), by_hand(model.backbone, x, dtype))
    assert model.backbone.forward_features(x, scale=2.0).dtype is F32
    mpinit.undo(model)
    assert not {"embed", "forward"} & set(vars(model)) and "forward_features" not in vars(model.backbone)


def test_an_entry_point_called_by_forward_casts_nothing_more() -> None:
    model = quietly(Classifier(), entry_points="classify")
    seen: list[torch.dtype] = []
    model.backbone.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    assert model(torch.randn(3, 4)).dtype is model.classify(torch.randn(3, 4)).dtype is F32
    assert set(seen) == {F16}
    assert model.classify.__wrapped__.__doc__ == "What forward does."


def test_casts_are_on_in_entry_points_at_o1_in_the_scope_of_a_model() -> None:
    model = quietly(Classifier(), "O1", cast_scope="model", entry_points="embed")
    seen: list[torch.dtype] = []
    model.backbone.encoder.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    assert model.embed(torch.randn(1, 4))["embedded"].dtype is F32
    assert seen == [F16]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("embd", "'embed'"),
        ("forward_features", "'backbone.forward_features'"),
        ("double", "no method of Classifier"),
        ("backbone", "no method of Classifier"),
    ],
)
def test_what_names_no_method_is_refused_before_anything_changes(name: str, near: str) -> None:
    model = Classifier()
    with pytest.raises(ValueError) as caught:
        quietly(model, entry_points=["embed", name])
    assert repr(name) in str(caught.value) and near in str(caught.value)
    assert "embed" not in vars(model) and model.offset.dtype is F32


@pytest.mark.parametrize("entry", [3, "a b", "", [len], ".", "a..b"])
def test_what_is_no_name_is_refused(entry: Any) -> None:
    if entry == "":
        assert mpinit.Properties(entry_points=entry).entry_points == ()
        return
    with pytest.raises(ValueError, match="entry_points"):
        quietly(Classifier(), entry_points=entry)
