"""One run of a model, watched: the run itself, at the level asked for, and everything put back after it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import checks
from ..plan import CastPolicy, Plan, make_plan
from ..session import Session
from ..settings.resolve import resolve
from ..torch_internals.backward_passes import unnoticed
from .aten_policy import AtenPolicy
from .findings import rows_of
from .footprint import bytes_per_parameter
from .precision_report import PrecisionReport
from .reasons import Reasons
from .recording import OUTSIDE, Recording
from .restoring import Untouched, same_modes, tensors_in

Loss = Callable[[Any], torch.Tensor]


def watched_run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Loss | None,
    opt_level: str | None,
    session: Session | None,
    optimizers: list[Optimizer],
) -> PrecisionReport:
    """Run a model once, leave no trace, and say what was seen.

    Args:
        model: the model.
        args, kwargs: what it is called with.
        loss: of its output; None: forward only.
        opt_level: the level to be at, for a model in no session; None: as it is.
        session: the model's; None where it is not initialised.
        optimizers: whose state counts.
    """
    others = [*tensors_in((args, dict(kwargs))), *_tensors_of(optimizers)]
    with Untouched([model], others) as untouched:
        sizes = bytes_per_parameter(model, session, optimizers)
        with _at_level(model, opt_level) as (target, applied):
            in_force = applied or session
            recording = Recording(target, _reasons(target, in_force), untouched)
            _run(target, args, dict(kwargs), loss, recording)
            types = {name: type(module).__name__ for name, module in target.named_modules()}
            level = in_force.opt_level if in_force is not None else ""
    return PrecisionReport(
        model=type(model).__name__,
        level=level,
        rows=rows_of(recording.tallies, types | {OUTSIDE: ""}),
        bytes_per_parameter=sizes,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        notes=_notes(loss, optimizers),
    )


def _tensors_of(optimizers: list[Optimizer]) -> list[torch.Tensor]:
    groups = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in groups if p.grad is not None]
    state = [value for optimizer in optimizers for values in optimizer.state.values() for value in tensors_in(values)]
    return [*groups, *gradients, *state]


@contextmanager
def _at_level(model: nn.Module, opt_level: str | None) -> Iterator[tuple[nn.Module, Session | None]]:
    """What is to be run, and the session made for it."""
    if opt_level is None:
        yield model, None
        return
    level, properties = resolve(opt_level, {})
    plan = make_plan(properties)
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied, which opt_level={opt_level!r} needs ({type(error).__name__}: "
            f"{error}): call mpinit.initialize on it, explain it without opt_level, and mpinit.undo it"
        ) from error
    checks.check([twin], [], properties, plan)
    session = Session([twin], [], level, properties, plan, num_losses=1, verbosity=0)
    session.apply()
    try:
        # Casts that the model leaves switched on would reach into the undo.
        with same_modes():
            yield twin, session
    finally:
        session.undo()


def _reasons(model: nn.Module, session: Session | None) -> Reasons:
    plan: Plan | None = None if session is None else session.plan
    kept = () if session is None else session.selection.float32_modules
    return Reasons(plan, kept, AtenPolicy(CastPolicy.TORCH if plan is None else plan.cast_policy))


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None, seen: Recording) -> None:
    if loss is None:
        with seen:
            model(*args, **kwargs)
        return
    parameters = list(model.parameters())
    leaves = [*parameters, *(t for t in tensors_in((args, kwargs)) if t.requires_grad and t.is_leaf)]
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        with torch.enable_grad(), unnoticed(), seen:
            value = loss(model(*args, **kwargs))
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise TypeError(f"loss must return a tensor with one number, not {_described(value)}")
            if value.requires_grad:
                torch.autograd.backward(value.reshape(()) if value.dim() else value)
    finally:
        for leaf, gradient in gradients:
            leaf.grad = None
            leaf.grad = gradient


def _described(value: Any) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _notes(loss: Loss | None, optimizers: list[Optimizer]) -> tuple[str, ...]:
    notes = []
    if loss is None:
        notes.append("Forward only: give loss=, a function of the output, for the backward pass.")
    if not optimizers:
        notes.append("Without an optimizer, its state counts as nothing: give optimizer= to have it counted.")
    return tuple(notes)
