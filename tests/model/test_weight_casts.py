"""Weight casts under O1 are shared within a forward and never outlive a weight change; nothing grows."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from casts import Initialize
from torch import nn
from torch.nn import functional as F

import mpinit


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def by_ema(model: nn.Module) -> None:
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model))
    by_hand(average.module)
    for parameter, mean in zip(model.parameters(), average.module.parameters(), strict=True):
        parameter.data.lerp_(mean.data, 1.0)


def by_loading(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [by_hand, by_data, by_ema, by_loading])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("scope", ["thread", "model"])
def test_a_weight_cast_never_outlives_a_change(
    change: Callable[[nn.Module], None], context: Callable[[], Any], scope: str, initialize: Initialize
) -> None:
    model = nn.Linear(4, 2, bias=False)
    nn.init.constant_(model.weight, 0.5)
    initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), cast_scope=scope)
    x = torch.ones(1, 4)
    with context():
        assert model(x)[0, 0].item() == 2.0
        assert F.linear(x, model.weight)[0, 0].item() == 2.0
    change(model)
    with context():
        assert model(x)[0, 0].item() == 4.0
        assert F.linear(x, model.weight)[0, 0].item() == 4.0
    output = model(x)
    output.sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0] * 4] * 2


def test_a_weight_shared_by_two_models_and_a_model_called_twice(initialize: Initialize) -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    reference = copy.deepcopy(first)
    models = nn.ModuleList([first, second])
    initialize(first)
    initialize(second)
    x = torch.randn(2, 3)
    loss = sum(model(x).float().sum() for model in (first, second, first))
    loss.backward()  # type: ignore[union-attr]
    with mpinit.disable_casts():
        (3 * reference(x).sum()).backward()
    torch.testing.assert_close(first.weight.grad, reference.weight.grad, rtol=1e-2, atol=1e-2)
    assert len(list(models.parameters())) == 1


def test_evaluating_inside_the_training_forward(initialize: Initialize) -> None:
    class SelfDistilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.net(x)
            return F.mse_loss(self.net(x + 1), target)

    model = SelfDistilled()
    initialize(model)
    model(torch.randn(2, 3)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_thousand_iterations_do_not_grow(initialize: Initialize) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    initialize(model, optimizer)
    x = torch.randn(2, 4)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    def iterate(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            with mpinit.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    iterate(10)
    before, objects = tensors(), len(gc.get_objects())
    iterate(1000)
    assert tensors() <= before
    assert len(gc.get_objects()) <= objects + 20
