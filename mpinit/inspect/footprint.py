"""Bytes a parameter in training, by kind."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.dtypes import is_lower_precision
from ..distributed.sharding import local
from ..plan import Masters, Plan

WEIGHTS: Final = "weights"
MASTERS: Final = "masters"
GRADIENTS: Final = "gradients"
STATE: Final = "optimizer state"
KINDS: Final = (WEIGHTS, MASTERS, GRADIENTS, STATE)

# Of a trained 16-bit weight, by its kind of master: the master, and the gradient.
_WITH_MASTERS: Final = {Masters.FULL: (4, 4), Masters.SPLIT: (2, 2)}


def bytes_per_parameter(model: nn.Module, plan: Plan | None, slots: float) -> dict[str, float]:
    """Mean bytes a parameter takes in training: "weights", "masters", "gradients", "optimizer state".

    Args:
        model: the model, with its weights as they are when it trains.
        plan: what is in force for it; None where it is not initialised.
        slots: how many numbers its optimizer keeps for one of a parameter's: :func:`slots_of`.

    Example:
        >>> bytes_per_parameter(nn.Linear(4, 4), None, slots=2.0)
        {'weights': 4.0, 'masters': 0.0, 'gradients': 4.0, 'optimizer state': 8.0}
    """
    total, numbers = dict.fromkeys(KINDS, 0.0), 0
    for parameter in {p: None for p in model.parameters() if p.is_floating_point()}:
        count, size = local(parameter).numel(), parameter.dtype.itemsize
        has_master = plan is not None and is_lower_precision(parameter.dtype) and plan.masters in _WITH_MASTERS
        master, gradient = _WITH_MASTERS[plan.masters] if plan is not None and has_master else (0, size)
        numbers += count
        total[WEIGHTS] += count * size
        if parameter.requires_grad:
            total[MASTERS] += count * master
            total[GRADIENTS] += count * gradient
            total[STATE] += count * slots * (4 if has_master else size)
    return {kind: value / max(1, numbers) for kind, value in total.items()}


def slots_of(optimizer: Optimizer) -> float:
    """How many numbers an optimizer keeps for one of a parameter's, such as 2 for Adam.

    Read off its state; before its first step, off that of a fresh one of its kind with one small parameter. An
    optimizer that cannot be made like that keeps none, as far as is known here.

    Example:
        >>> slots_of(torch.optim.Adam(nn.Linear(2, 2).parameters()))
        2.0
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if optimizer.state.get(p)]
    if not parameters:
        parameters = [nn.Parameter(torch.zeros(2, 3))]
        accepted = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        fresh: Any = type(optimizer)
        try:
            optimizer = fresh(parameters, **options)
            parameters[0].grad = torch.ones(2, 3)
            optimizer.step()
        except Exception:  # whatever a foreign optimizer's constructor or step may say
            return 0.0
    kept = sum(
        value.numel()
        for parameter in parameters
        for value in optimizer.state[parameter].values()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    )
    return kept / max(1, sum(local(parameter).numel() for parameter in parameters))
