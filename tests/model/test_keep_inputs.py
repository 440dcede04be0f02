"""keep_inputs: arguments that are passed as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inputs import F16, F32, X
from models import quietly
from torch import Tensor, nn

import mpinit


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, images: Tensor, targets: Any = None, *more: Any, scale: Any = None, **rest: Any) -> Any:
        return SimpleNamespace(images=images, targets=targets, more=more, scale=scale, rest=rest)

    def predict(self, images: Tensor, anchors: Tensor) -> Any:
        return SimpleNamespace(images=images, anchors=anchors)


BOXES = torch.tensor([1203.9])


@pytest.mark.parametrize(
    "call",
    [
        lambda m, t: m(X, t),
        lambda m, t: m(X, targets=t),
        lambda m, t: m(targets=t, images=X),
        lambda m, t: m.forward(X, t),
    ],
)
@pytest.mark.parametrize(
    "keep", ["targets", "targ*", ["scale", "targets"], lambda name, value: name == "targets", [lambda n, v: n > "j"]]
)
@pytest.mark.parametrize("boxes", [BOXES, [{"boxes": BOXES}]], ids=["tensor", "nested"])
def test_arguments_named_are_passed_as_they_are(keep: Any, call: Callable[..., Any], boxes: Any) -> None:
    got = call(quietly(Detector(), keep_inputs=keep), boxes)
    assert got.images.dtype is F16
    assert got.targets is boxes


def test_without_it_targets_are_rounded() -> None:
    assert quietly(Detector())(X, BOXES).targets.item() == 1204.0


def test_the_rest_of_the_arguments_have_the_names_of_the_signature() -> None:
    seen: dict[str, Any] = {}
    model = quietly(Detector(), keep_inputs=lambda name, value: bool(seen.setdefault(name, value) is None))
    model(X, None, 1, 2, scale=3, other=4)
    assert seen == {"images": X, "targets": None, "more": 1, "scale": 3, "other": 4}


def test_arguments_of_entry_points_and_of_parts_called_by_themselves() -> None:
    model = nn.Sequential(Detector())
    quietly(model, keep_inputs=["anchors", "targets"], entry_points="0.predict")
    assert model[0].predict(X, BOXES).anchors is BOXES
    assert model[0](X, BOXES).targets is BOXES
    twin = copy.deepcopy(model)
    assert twin[0].predict(X, anchors=BOXES).anchors is BOXES


def test_loss_inside_of_forward_is_that_of_the_targets_given() -> None:
    class WithLoss(Detector):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
            return nn.functional.mse_loss(self.linear(x).float(), target)

    target = torch.tensor([[1203.9, 1203.9]])
    model = quietly(WithLoss(), keep_inputs="target")
    expected = nn.functional.mse_loss(model.linear(X.half()).float(), target)
    assert torch.equal(model(X, target), expected)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(X, target), expected)


@pytest.mark.parametrize(
    ("keep", "says"), [("target", "'input'"), (3, "argument"), (Tensor, "predicate"), ([None], "")]
)
def test_what_is_no_argument_is_refused_before_anything_changes(keep: Any, says: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=rf"keep_inputs.*{says}"):
        quietly(model, keep_inputs=keep)
    assert model.weight.dtype is F32 and "forward" not in vars(model)
    assert mpinit.Properties(keep_inputs="None").keep_inputs == ()
