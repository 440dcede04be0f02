"""Every optimizer of other packages that trying admits steps in many small buckets as in one, to the bit."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mpinit

PACKAGES = ("pytorch_optimizer", "timm.optim", "lion_pytorch")
# A few for every run, where they are installed.
SAMPLE = ("AdaBelief", "Lion", "SOAP", "AdamP")


def classes() -> Iterator[Any]:
    for package in PACKAGES:
        try:
            module = importlib.import_module(package)
        except Exception:  # a package that is there may still not load
            continue
        for name, cls in sorted(vars(module).items()):
            if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
                marks = () if name in SAMPLE else (pytest.mark.nightly,)
                yield pytest.param(cls, id=f"{package}.{name}", marks=marks)


def trained(cls: Any, bucket_bytes: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    try:
        optimizer = cls(model.parameters(), lr=1e-3)
    except Exception as error:
        pytest.skip(f"not made from parameters and a learning rate: {error}")
    try:
        options = {"split_bucket_bytes": bucket_bytes, "verbosity": 0}
        mpinit.initialize(model, optimizer, "O5", master_weights="split", **options)
    except ValueError as error:
        pytest.skip(f"refused: {error}")
    for index in range(10):
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(index))
        optimizer.zero_grad()
        with mpinit.scale_loss(model(x).square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    mpinit.undo(model)
    return state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls", [*classes()])
def test_buckets_do_not_matter(cls: Any) -> None:
    many, one = trained(cls, 4), trained(cls, 2**26)
    assert all(torch.equal(many[name], value) for name, value in one.items())
