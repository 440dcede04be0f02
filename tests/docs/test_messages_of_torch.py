"""Torch's own messages that the page of messages explains: torch raises them so, and what the page advises works."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from snippets import ROOT
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import mpinit

PAGE = (ROOT / "docs/reference/messages.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| torch: `(.+?)`", PAGE, re.MULTILINE)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def pair(level: str = "O2", **keywords: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, level, **keywords)
    return model, optimizer


def average(inside: bool) -> None:
    model, _ = pair()
    means = [weight.detach().float() for weight in model.parameters()]
    if not inside:
        for mean, weight in zip(means, model.parameters(), strict=True):
            mean.lerp_(weight, 0.5)
    with mpinit.float32_weights(model):
        for mean, weight in zip(means, model.parameters(), strict=True):
            mean.lerp_(weight, 0.5)


def average_by_torch(inside: bool) -> None:
    model, _ = pair()
    mean = AveragedModel(model)
    mean.update_parameters(model)
    if not inside:
        mean.update_parameters(model)
    with mpinit.float32_weights(model):
        mean.update_parameters(model)


def use_weight_outside(inside: bool) -> None:
    model, _ = pair()
    if not inside:
        F.linear(torch.ones(1, 4), model.layer.weight)
    with mpinit.float32_weights(model):
        F.linear(torch.ones(1, 4), model.layer.weight)


def call_with_array(inside: bool) -> None:
    model, _ = pair()
    x = np.ones((1, 4), dtype=np.float32)
    model(torch.from_numpy(x) if inside else x)


def embed_floats(inside: bool) -> None:
    model = mpinit.initialize(nn.Embedding(4, 2), opt_level="O2")
    ids = torch.ones(3)
    model(ids.long() if inside else ids)


def scale_vector(inside: bool) -> None:
    model, optimizer = pair()
    loss = model(torch.ones(3, 4))
    with mpinit.scale_loss(loss.mean() if inside else loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def train_frozen(inside: bool) -> None:
    model, optimizer = pair()
    model.requires_grad_(inside)
    with mpinit.scale_loss(model(torch.ones(3, 4)).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()


def unscale_float16(inside: bool) -> None:
    model, optimizer = pair("O2", loss_scale=1.0, **({"grad_dtype": torch.float32} if inside else {}))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(3, 4)).mean()).backward()
    scaler.unscale_(optimizer)


def export_after_backward(inside: bool) -> None:
    model, optimizer = pair()
    with mpinit.scale_loss(model(torch.ones(3, 4)).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    if inside:
        optimizer.zero_grad()
    torch.export.export(model, (torch.ones(3, 4),))


PROVOKED: dict[str, Callable[[bool], None]] = {
    "expected dtype float for": average,
    "Tensors of the same index": average_by_torch,
    "expected m1 and m2": use_weight_outside,
    "linear(): argument": call_with_array,
    "Expected tensor for argument": embed_floats,
    "grad can be implicitly": scale_vector,
    "element 0 of tensors": train_frozen,
    "Attempting to unscale": unscale_float16,
    "attempting to assign a gradient": export_after_backward,
    # tests/integrations/test_installed.py looks for this one.
    "operator torchvision::nms": lambda inside: None,
}


def provoke(row: str) -> Callable[[bool], None]:
    (found,) = (call for beginning, call in PROVOKED.items() if row.startswith(beginning))
    return found


def test_every_row_is_provoked_by_one_test() -> None:
    assert len(ROWS) == len(PROVOKED) and len(set(map(provoke, ROWS))) == len(ROWS)


@pytest.mark.parametrize("row", [row for row in ROWS if "torchvision" not in row])
def test_torch_raises_the_message_and_the_advice_works(row: str) -> None:
    call = provoke(row)
    pattern = ".*".join(map(re.escape, row.split("...")))
    with pytest.raises((RuntimeError, TypeError, ValueError), match=f"^{pattern}"):
        call(False)
    call(True)
