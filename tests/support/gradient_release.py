"""What the tests of gradient_release=True share: a net with all kinds of weights, its loop, and what comes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpinit

SPLIT: dict[str, Any] = {"master_weights": "split"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("O5", {}),
    "float16": ("O2", {}),
    "split": ("O5", SPLIT),
    "split-int8": ("O5", SPLIT | {"optimizer_state": "int8"}),
    "split-bfloat16": ("O5", SPLIT | {"optimizer_state": "bfloat16"}),
    "model": ("O5", {"master_weights": "model"}),
    "O0-int8": ("O0", {"optimizer_state": "int8"}),
    "O0": ("O0", {}),
    "O1": ("O1", {}),
    "O3": ("O3", {"cast_model_type": "bf16"}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Tied weights, a layer used twice, one that is frozen and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 24)
        self.twice, self.once = nn.Linear(24, 24), nn.Linear(24, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 200, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.twice(self.embedding(x)).tanh()
        hidden = hidden + self.frozen(self.twice(hidden).tanh())
        return self.head(self.norm(self.once(hidden)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    thin = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    wide = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    groups = [{"params": wide}, {"params": thin, "lr": 0.01, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)


def set_up(kind: str = "split", make: Make = adamw, **more: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    level, extra = KINDS[kind]
    options = {"gradient_release": True, "split_bucket_bytes": 6000, "loss_scale": 1.0, "verbosity": 0}
    mpinit.initialize(model, optimizer, level, **(options | extra | more))
    return model, optimizer


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x = torch.randint(200, (4, 6), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for index in range(steps):
        optimizer.zero_grad()
        if index % 2:
            with mpinit.scale_loss(loss_of(model, index), optimizer) as scaled:
                scaled.backward()
        else:
            loss_of(model, index).backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Weights, states and options, in an order that does not depend on who was stepped first."""
    state = optimizer.state_dict()
    found: list[Any] = [value.clone() for value in model.state_dict().values()]
    for _, entries in sorted(state["state"].items()):
        found += [leaf for key in sorted(entries) for leaf in (key, copy.deepcopy(entries[key]))]
    return found + copy.deepcopy(state["param_groups"])


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
