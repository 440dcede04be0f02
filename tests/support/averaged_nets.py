"""A net whose averages and copies are looked at, initialised with each kind of masters."""

from __future__ import annotations

import torch
from models import LEVELS
from torch import Tensor, nn

import mpinit

KINDS = ("O2", "O5", "split")


class Net(nn.Module):
    """Weights that get masters, a frozen one, BatchNorm that stays float32, and a 16-bit buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * self.frozen
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        return self.last(x - self.mean.to(x.dtype))


def start(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[kind])
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    with mpinit.scale_loss(model(torch.randn(4, 8)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def masters_of(model: nn.Module) -> dict[str, Tensor]:
    names = {name for name, _ in model.named_parameters()}
    return {name: value.clone() for name, value in model.state_dict().items() if name in names}
