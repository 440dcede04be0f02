"""An optimizer's state: moved between a weight and its master, and cast with a parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from .dtypes import is_lower_precision
from .logs import log
from .patching import Undo, UndoStack


def move_state(optimizer: Optimizer, old: torch.Tensor, new: torch.Tensor, dtype: torch.dtype) -> None:
    """Hand a parameter's optimizer state to another parameter, floating entries in ``dtype``.

    That of optimizers wrapped by this one too, since they share its parameters. Counters named "step" keep their
    dtype, as in ``Optimizer.load_state_dict``.
    """
    for holder in (optimizer, *_wrapped_by(optimizer)):
        if old in holder.state:
            holder.state[new] = cast_state(holder.state.pop(old), dtype)


def _wrapped_by(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers held by one that wraps them and forwards their groups."""
    return [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]


def cast_state(state: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors of one parameter's state, counters named "step" aside."""
    if not isinstance(state, dict):
        return state
    for key, value in state.items():
        if key != "step" and isinstance(value, torch.Tensor) and value.is_floating_point():
            state[key] = value.to(dtype)
    return state


def cast_states(optimizers: list[Optimizer], targets: Mapping[torch.Tensor, torch.dtype]) -> Undo:
    """Cast the existing state of parameters that are cast without a master."""
    with UndoStack() as undos:
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                if isinstance(parameter, torch.Tensor) and targets.get(parameter, parameter.dtype) != parameter.dtype:
                    before = dict(state)
                    cast_state(state, targets[parameter])
                    undos.push(_restorer(state, before, parameter))
    return undos.unwind


def _restorer(state: dict[str, Any], before: dict[str, Any], parameter: torch.Tensor) -> Callable[[], None]:
    cast = dict(state)
    dtype = parameter.dtype

    def restore() -> None:
        # What no step has replaced since goes back bit for bit; the rest follows the parameter's dtype.
        untouched = {key: value for key, value in before.items() if state.get(key) is cast[key]}
        cast_state(state, dtype)
        state.update(untouched)

    return restore


def avoid_unsound_kernels(optimizer: Optimizer, targets: Mapping[torch.Tensor, torch.dtype]) -> list[dict[str, Any]]:
    """Turn ``fused`` off in groups whose fused step torch computes wrongly.

    Args:
        optimizer: its groups are changed.
        targets: the dtypes that parameters are about to be cast to.

    Returns:
        The groups changed.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    changed = []
    for group in optimizer.param_groups:
        stepped = {targets.get(p, p.dtype) for p in group["params"] if group.get("fused") and p.device.type == "cpu"}
        if any(is_lower_precision(dtype) and not fused_sgd_is_sound("cpu", dtype) for dtype in stepped):
            group["fused"] = False
            changed.append(group)
            log.info("SGD(fused=True) is wrong on 16-bit CPU parameters in torch %s: not fused here", torch.__version__)
    return changed


@functools.cache
def fused_sgd_is_sound(device_type: str, dtype: torch.dtype) -> bool:
    """Whether ``torch.optim.SGD(fused=True)`` updates parameters of this kind rightly: asked of torch by a step.

    On a CPU it did not in 16 bit, in the versions 2.11 to 2.13.
    """
    parameter = torch.ones(16, dtype=dtype, device=device_type)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5, fused=True).step()
    return bool((parameter == 0.5).all())
