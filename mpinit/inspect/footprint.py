"""Bytes a parameter, by kind, as things are and at every level."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.dtypes import is_lower_precision
from ..distributed.sharding import local
from ..model.selection import select
from ..plan import Masters, Plan, make_plan
from ..session import Session
from ..settings.opt_levels import OPT_LEVELS

WEIGHTS: Final = "weights"
MASTERS: Final = "masters"
GRADIENTS: Final = "gradients"
STATE: Final = "optimizer state"
KINDS: Final = (WEIGHTS, MASTERS, GRADIENTS, STATE)
NOW: Final = "now"

_MASTER_BYTES: Final = {Masters.NONE: 0, Masters.FULL: 4, Masters.SPLIT: 2}
# A full master's gradient is float32, on weight and master the same; a split one's is the weight's.
_GRADIENT_BYTES: Final = {Masters.FULL: 4, Masters.SPLIT: 2}


def bytes_per_parameter(
    model: nn.Module, session: Session | None, optimizers: Iterable[Optimizer]
) -> dict[str, dict[str, float]]:
    """Mean bytes a parameter takes in training: "now", and at every level with nothing overridden.

    Args:
        model: the model.
        session: the session that it is in; None where it is not initialised.
        optimizers: that train it. Without any, their state counts as nothing.

    Returns:
        "now", "O0" to "O5" -> "weights", "masters", "gradients", "optimizer state" -> bytes.

    Example:
        >>> found = bytes_per_parameter(nn.Linear(4, 4), None, [])
        >>> found["O2"]["weights"], found["O2"]["masters"], found["O0"]["weights"]
        (2.0, 4.0, 4.0)
    """
    parameters = list(dict.fromkeys(p for p in model.parameters() if p.is_floating_point()))
    slots = max((slots_of(optimizer) for optimizer in optimizers), default=0.0)
    plan = None if session is None else session.plan
    present = {p: p.dtype for p in parameters}
    before = dict.fromkeys(parameters, torch.float32) if plan is not None and plan.cast_model else present
    found = {NOW: _footprint(parameters, present, plan, slots)}
    for level, properties in OPT_LEVELS.items():
        at_level = make_plan(properties)
        targets: Mapping[torch.Tensor, torch.dtype] = select([model], at_level).targets
        found[level] = _footprint(parameters, {p: targets.get(p, before[p]) for p in parameters}, at_level, slots)
    return found


def _footprint(
    parameters: list[nn.Parameter], dtypes: Mapping[nn.Parameter, torch.dtype], plan: Plan | None, slots: float
) -> dict[str, float]:
    total = dict.fromkeys(KINDS, 0.0)
    for parameter in parameters:
        count, size, lower = local(parameter).numel(), dtypes[parameter].itemsize, is_lower_precision(dtypes[parameter])
        masters = plan.masters if plan is not None and lower and parameter.requires_grad else Masters.NONE
        total[WEIGHTS] += count * size
        total[MASTERS] += count * _MASTER_BYTES[masters]
        if parameter.requires_grad:
            total[GRADIENTS] += count * _GRADIENT_BYTES.get(masters, size)
            total[STATE] += count * slots * (size if masters is Masters.NONE else 4)
    numbers = sum(local(parameter).numel() for parameter in parameters)
    return {kind: value / numbers if numbers else 0.0 for kind, value in total.items()}


def slots_of(optimizer: Optimizer) -> float:
    """How many numbers an optimizer keeps for one of a parameter's, such as 2 for Adam.

    Read off its state; before its first step, off that of a fresh one of its kind with one small parameter. An
    optimizer that cannot be made like that keeps none, as far as is known here.

    Example:
        >>> slots_of(torch.optim.Adam(nn.Linear(2, 2).parameters()))
        2.0
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if optimizer.state.get(p)]
    if parameters:
        return _slots(optimizer, parameters)
    try:
        probe = nn.Parameter(torch.zeros(2, 3))
        accepted = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        fresh: Any = type(optimizer)([probe], **options)
        probe.grad = torch.ones_like(probe)
        fresh.step()
        return _slots(fresh, [probe])
    except Exception:  # whatever a foreign optimizer's constructor or step may say
        return 0.0


def _slots(optimizer: Optimizer, parameters: list[Any]) -> float:
    kept = sum(
        value.numel()
        for parameter in parameters
        for value in optimizer.state[parameter].values()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    )
    return kept / max(1, sum(local(parameter).numel() for parameter in parameters))
