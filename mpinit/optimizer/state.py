"""An optimizer's state: moved between a weight and its master, and cast with a parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ..basics.dtypes import is_lower_precision
from ..basics.patching import Undo, UndoStack


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
    """Cast the state of parameters that are cast without a master; its undo casts state made since then as well."""
    dtypes = {parameter: parameter.dtype for parameter, dtype in targets.items() if dtype != parameter.dtype}
    with UndoStack() as undos:
        for optimizer in optimizers:
            known = {parameter for parameter in optimizer.state if parameter in dtypes}
            undos.push(functools.partial(_cast_newer_states, optimizer, dtypes, known))
            for parameter in known:
                state = optimizer.state[parameter]
                before = dict(state)
                cast_state(state, targets[parameter])
                undos.push(_restorer(state, before, parameter))
    return undos.unwind


def _cast_newer_states(
    optimizer: Optimizer, dtypes: Mapping[torch.Tensor, torch.dtype], known: set[torch.Tensor]
) -> None:
    for holder in (optimizer, *_wrapped_by(optimizer)):
        for parameter, state in holder.state.items():
            if parameter in dtypes and parameter not in known:
                cast_state(state, dtypes[parameter])


def _restorer(state: dict[str, Any], before: dict[str, Any], parameter: torch.Tensor) -> Callable[[], None]:
    cast = dict(state)
    dtype = parameter.dtype

    def restore() -> None:
        # What no step has replaced since goes back bit for bit; the rest follows the parameter's dtype.
        untouched = {key: value for key, value in before.items() if state.get(key) is cast[key]}
        cast_state(state, dtype)
        state.update(untouched)

    return restore


def stepped_unsoundly(optimizer: Optimizer, targets: Mapping[torch.Tensor, torch.dtype]) -> list[dict[str, Any]]:
    """The groups with parameters that a fused kernel of torch would step wrongly, whether it is in use or not.

    Args:
        optimizer: an optimizer, or one that wraps another.
        targets: the dtypes that parameters are about to be cast to.
    """
    if not any(isinstance(each, torch.optim.SGD) for each in (optimizer, *_wrapped_by(optimizer))):
        return []
    found = []
    for group in optimizer.param_groups:
        dtypes = {targets.get(p, p.dtype) for p in group["params"] if p.device.type == "cpu" and p.requires_grad}
        if not all(fused_sgd_is_sound_on_cpu(dtype) for dtype in dtypes if is_lower_precision(dtype)):
            found.append(group)
    return found


@contextmanager
def unfused(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Groups' ``fused`` switched off for a step."""
    switched = [group for group in groups if group.get("fused")]
    for group in switched:
        group["fused"] = False
    try:
        yield
    finally:
        for group in switched:
            group["fused"] = True


@functools.cache
def fused_sgd_is_sound_on_cpu(dtype: torch.dtype) -> bool:
    """Whether SGD's fused kernel updates parameters of this kind rightly: asked of the kernel itself.

    In 16 bit it did not, in torch 2.11 to 2.13, from 16 elements on.
    """
    parameter = torch.ones(512, dtype=dtype)
    torch._fused_sgd_(
        *([parameter], [torch.ones_like(parameter)], []),
        lr=0.5, momentum=0.0, weight_decay=0.0, dampening=0.0, nesterov=False, maximize=False, is_first_step=True,
    )  # fmt: skip
    return bool((parameter == 0.5).all())
