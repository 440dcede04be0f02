"""What an optimizer from another package does in its step, where that is done in parts: as if it were done at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpinit

KINDS: dict[str, dict[str, Any]] = {
    "split, parts": {"master_weights": "split", "split_bucket_bytes": 512},
    "split, whole": {"master_weights": "split"},
    "int8": {"optimizer_state": "int8", "split_bucket_bytes": 512},
    "split, int8": {"master_weights": "split", "optimizer_state": "int8", "split_bucket_bytes": 512},
}
kinds = pytest.mark.parametrize("kind", KINDS)


class Own(torch.optim.Optimizer):
    """Momentum; ``way`` is what else its step does, which makes no difference to a loop that clears gradients."""

    steps_per_parameter = False

    def __init__(self, params: Any, lr: float = 0.05, way: str = "") -> None:
        super().__init__(params, {"lr": lr, "way": way})

    def update(self, parameter: torch.Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["average"] = torch.zeros_like(parameter)
        state["average"].mul_(0.9).add_(parameter.grad)
        parameter.add_(state["average"], alpha=-lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group["lr"], group["way"])
        if group["way"].startswith("zero_grad"):
            self.zero_grad(set_to_none=group["way"] == "zero_grad")

    def _step_one(self, parameter: torch.Tensor, lr: float, way: str) -> None:
        if way == "contiguous":
            parameter.data = parameter.data.contiguous()
        if way == "copy":
            parameter.data = parameter.data.clone()
        if way == "calls a method of its own":
            self.update(parameter, lr)
        else:
            Own.update(self, parameter, lr)
        if way == "clears":
            parameter.grad = None
        if way == "zeroes":
            parameter.grad.zero_()


def trained(kind: str, way: str, clears: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 80), nn.Tanh(), nn.Linear(80, 64))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = Own(model.parameters(), way=way)
    optimizer.steps_per_parameter = kind != "split, whole"
    mpinit.initialize(model, optimizer, "O5", verbosity=0, **KINDS[kind])
    for index in range(4):
        if clears:
            optimizer.zero_grad()
        x = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(index))
        with mpinit.scale_loss(model(x).square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@kinds
@pytest.mark.parametrize("way", ["contiguous", "copy", "calls a method of its own"])
def test_ways_of_writing_to_parameters(kind: str, way: str) -> None:
    torch.testing.assert_close(trained(kind, way), trained(kind, ""), rtol=0, atol=0)


@kinds
@pytest.mark.parametrize("way", ["clears", "zeroes", "zero_grad", "zero_grad to zero"])
def test_ways_of_clearing_gradients(kind: str, way: str) -> None:
    torch.testing.assert_close(trained(kind, way, clears=False), trained(kind, ""), rtol=0, atol=0)
