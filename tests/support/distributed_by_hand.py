"""A run by mpinit and the same by hand, in plain torch, on any of distributed_engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from distributed_engines import LEVELS, Engine, State, batches, loss_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import mpinit


class CastByHand(nn.Module):
    """A float32 model whose forward runs on casts of its parameters, one for every place they have in it.

    Without a type: a model that is 16-bit already. Inputs are cast too, and outputs are float32.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, casts_weights: bool = True) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.casts_weights = casts_weights

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype) if x.is_floating_point() else x
        if not self.casts_weights:
            return self.model(x).float()
        named = self.model.named_parameters(remove_duplicate=False)
        casts = {name: parameter.to(self.dtype) for name, parameter in named}
        result: Tensor = torch.func.functional_call(self.model, casts, x, tie_weights=False)
        return result.float()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def cycles(engine: Engine, count: int) -> Iterator[list[tuple[Tensor, Tensor, int]]]:
    """The batches of each step."""
    parts = [engine.part(batch) for batch in batches(count * engine.micros)]
    for start in range(0, len(parts), engine.micros):
        yield parts[start : start + engine.micros]


def passes(engine: Engine, runs: Any, micros: list[tuple[Tensor, Tensor, int]]) -> Iterator[Tensor]:
    """The losses of one cycle, each where its backward belongs."""
    for index, (x, y, rows) in enumerate(micros):
        with engine.quiet(runs) if index + 1 < len(micros) else contextlib.nullcontext(), engine.around():
            yield loss_of(runs(x).float(), y, rows) / len(micros)


def pair(engine: Engine, level: str, **more: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """What runs, the model, and its optimizer, initialised."""
    runs: Any = engine.network()
    model = runs = engine.wrap(runs, None) if engine.comes_first else runs
    optimizer = sgd(model.parameters())
    mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[level][0] | more)
    return runs if engine.comes_first else engine.wrap(model, None), model, optimizer


def trained(engine: Engine, level: str, steps: int) -> State:
    """By mpinit."""
    runs, model, optimizer = pair(engine, level)
    for micros in cycles(engine, steps):
        optimizer.zero_grad()
        for loss in passes(engine, runs, micros):
            with mpinit.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
    assert mpinit.step_counts(optimizer) == (steps, 0)
    state = full(model.state_dict())
    mpinit.undo(model)
    return state


def trained_by_hand(engine: Engine, level: str, steps: int) -> State:
    """In plain torch, on the same engine."""
    _, dtype, scale = LEVELS[level]
    runs: Any = (engine.by_hand or engine.network)()
    policy = dtype if engine.has_policy else None
    model = runs = engine.wrap(runs, policy) if engine.comes_first else runs
    weights = dict(model.named_parameters())
    masters = weights
    if dtype is not None and level == "model":
        runs = CastByHand(model, dtype)
    elif dtype is not None and not engine.has_policy:
        masters = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        model.to(dtype)
        weights = dict(model.named_parameters())
        round_into(weights, masters, level)
    runs = runs if engine.comes_first else engine.wrap(runs, None)
    optimizer = sgd(masters.values())
    for micros in cycles(engine, steps):
        for weight in weights.values():
            weight.grad = None
        for loss in passes(engine, runs, micros):
            (loss * scale).backward()
        for weight, master in zip(weights.values(), masters.values(), strict=True):
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype) / scale
        optimizer.step()
        round_into(weights, masters, level)
    return full(masters)


@torch.no_grad()
def round_into(weights: State, masters: State, level: str) -> None:
    """Masters into weights, to the nearest; of two that are as near, split masters take the larger one."""
    for weight, master in zip(weights.values(), masters.values(), strict=True):
        if weight is not master and level == "split":
            master = ((master.view(torch.int32) + 0x8000) >> 16 << 16).view(torch.float32)
        if weight is not master:
            weight.copy_(master)


def full(state: State) -> State:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in state.items()
    }
