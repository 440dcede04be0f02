"""A model and optimizer whose states torch.distributed.checkpoint takes, at every level, and comparing these."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import models
import torch
from loops import keywords, momentum
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Adam, AdamW, Optimizer

import mpinit

LEVELS = {level: models.LEVELS[level] | {"verbosity": 0} for level in ("O0", "O1", "O2", "O5", "split")}
WITH_MASTERS = ("O2", "O5", "split")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": functools.partial(Adam, lr=0.01),
    "adamw": functools.partial(AdamW, lr=0.01, amsgrad=True),
    "momentum": momentum,
}
OPTIONS = {
    "plain": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full, offload": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "flat, full": StateDictOptions(flatten_optimizer_state_dict=True, full_state_dict=True),
}
State = tuple[dict[str, Any], dict[str, Any]]


class Net(nn.Module):
    """A weight used twice under two names, and a frozen bias."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first = [p for name, p in model.named_parameters() if name.endswith("weight")]
    return [{"params": first}, {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.02}]


def build(level: str | None, name: str = "adam", seed: int = 0) -> tuple[nn.Module, Optimizer]:
    model = Net(seed)
    optimizer = OPTIMIZERS[name](groups(model))
    if level is not None:
        mpinit.initialize(model, optimizer, **LEVELS.get(level, keywords(level)))
    return model, optimizer


def entries(state: Any, where: str = "") -> dict[str, Any]:
    """A state, flat, so that two can be compared."""
    if isinstance(state, (dict, list, tuple)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {key: value for name, part in items for key, value in entries(part, f"{where}.{name}").items()}
    return {where: state}


def assert_same(ours: Any, theirs: Any, dtype: torch.dtype | None = torch.float32) -> None:
    """Two states are equal to the bit, in the same types; all tensors in ``dtype``, if given."""
    ours, theirs = entries(ours), entries(theirs)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[key].dtype == (dtype or value.dtype), key
            assert torch.equal(value, theirs[key]), key
        else:
            assert value == theirs[key], key


def saved(model: nn.Module, optimizer: Any, options: str = "plain") -> State:
    return copy.deepcopy(get_state_dict(model, optimizer, options=OPTIONS[options]))


def load(state: State, model: nn.Module, optimizer: Any, options: str = "plain") -> None:
    ours, theirs = copy.deepcopy(state)
    set_state_dict(model, optimizer, model_state_dict=ours, optim_state_dict=theirs, options=OPTIONS[options])
