"""State dicts of modules that save in a way of their own: their own tensors have their float32 bits."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import mpinit


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(8))
        self.register_buffer("hidden", torch.randn(8), persistent=False)
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.table.sum()


class Tensors(Part):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in ("table", "hidden", "weight"):
            destination[prefix + name] = getattr(self, name)


class Detached(Part):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in ("table", "hidden", "weight"):
            destination[prefix + name] = getattr(self, name).detach()[:2]


class Packed(Part):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = {"table": self.table, "rest": [self.hidden, (self.weight, 3)]}


class Extra(Part):
    def get_extra_state(self) -> Any:
        return {"table": self.table, "hidden": self.hidden, "weight": self.weight, "other": OTHER}

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


OTHER = torch.ones(3, dtype=torch.bfloat16)
NAMES = ("table", "hidden", "weight")


def saved(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return all entries of the part by their own names."""
    found = {key.rpartition(".")[2]: value for key, value in state.items()}
    if "packed" in found:
        packed: Any = found.pop("packed")
        found |= {"table": packed["table"], "hidden": packed["rest"][0], "weight": packed["rest"][1][0]}
        assert packed["rest"][1][1] == 3
    extra: Any = found.pop("_extra_state", {})
    return found | dict(extra)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("kind", [Tensors, Detached, Packed, Extra])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_saved_tensors_have_their_float32_bits(level: str, kind: type[Part], beside: bool) -> None:
    part = kind()
    model = nn.Sequential(nn.Linear(4, 4), part) if beside else part
    before = {name: getattr(part, name).detach().clone() for name in NAMES}
    mpinit.initialize(model, AdamW(model.parameters(), lr=0.1), level)
    found = saved(model.state_dict())
    for name in NAMES:
        expected = before[name][:2] if kind is Detached else before[name]
        assert found[name].dtype is torch.float32 and torch.equal(found[name], expected), name
    assert not found.get("weight", torch.ones(())).requires_grad or kind is Extra
    # What is no tensor of the model stays as the module saved it.
    assert found.get("other", OTHER) is OTHER


@pytest.mark.parametrize("kind", [Tensors, Packed])
def test_variables_that_are_asked_for_stay(kind: type[Part]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), kind())
    mpinit.initialize(model, AdamW(model.parameters(), lr=0.1), "O5")
    found = saved(model.state_dict(keep_vars=True))
    assert found["weight"] is model[1].weight and found["table"] is model[1].table


def test_entries_load_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Tensors())
    mpinit.initialize(model, AdamW(model.parameters(), lr=0.1), "O5")
    state = {key: value.clone() for key, value in model.state_dict().items() if "hidden" not in key}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    for key, value in model.state_dict().items():
        assert "hidden" in key or torch.equal(value, state[key]), key
