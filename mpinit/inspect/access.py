"""What the inspectors ask of the core, all of it here: the other files see tensors, names and numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..model.forward import take_off_copy
from ..optimizer.overflow_log import OverflowLog
from ..optimizer.step_counts import StepCounts
from ..scaling.unscaling import dense_view
from ..session import Request, Session


def session_of(optimizer: Optimizer) -> Session:
    """The session of an optimizer.

    Raises:
        RuntimeError: it is not initialised.
    """
    return registry.session_of(optimizer)


def session_if_any(owner: nn.Module | Optimizer) -> Session | None:
    """The session of a model or optimizer; None where it is not initialised."""
    return registry.of(owner)


# -- one optimizer ----------------------------------------------------------------------------------------------------


def parameters_of(session: Session, optimizer: Optimizer) -> list[nn.Parameter]:
    """The model's parameters that an optimizer steps, each once, in the order of its groups."""
    return session.managed(optimizer).parameters()


def master_values(session: Session, weight: torch.Tensor) -> torch.Tensor | None:
    """The float32 values of a weight that has a master; None of one that has none."""
    master = session.masters.of(weight)
    return None if master is None else session.float32_values(weight)


def gradient_of(session: Session, weight: torch.Tensor) -> torch.Tensor | None:
    """The gradient that the next step uses for a weight."""
    return weight.grad


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The real, dense tensor that holds a tensor's numbers: a sparse one's values, a complex one's real view."""
    return dense_view(tensor.coalesce() if tensor.is_sparse else tensor)


def observers_of(session: Session, optimizer: Optimizer) -> list[Any]:
    """The objects whose ``backward_ended(loss, scaler)`` and ``step_ended(skipped)`` are called; to be added to.

    ``backward_ended`` is called when a scaled backward pass is over, with unscaled gradients, before the scale moves;
    ``step_ended`` after each step, while its gradients are there. ``skipped`` is a bool, or a 0-dimensional tensor
    above 0 where a kernel on the device skipped.
    """
    observers: list[Any] = session.managed(optimizer).observers
    return observers


def overflow_log_of(session: Session, optimizer: Optimizer) -> OverflowLog:
    """What is known of the last overflow of an optimizer."""
    return session.managed(optimizer).overflow_log


def step_counts_of(session: Session, optimizer: Optimizer) -> StepCounts:
    """Steps done and skipped; waits for the device."""
    return session.managed(optimizer).counts


def count_masters(session: Session, optimizer: Optimizer) -> int:
    """How many weights of an optimizer have a master."""
    return len(session.managed(optimizer).members.masters)


# -- one session ------------------------------------------------------------------------------------------------------


def scale_of(scaler: Any) -> torch.Tensor:
    """The present loss scale, on the device."""
    scale: torch.Tensor = scaler.scale_now()
    return scale


def waiting_weights(session: Session) -> Sequence[torch.Tensor]:
    """Weights whose masters wait for an optimizer."""
    return session.waiting_weights()


def kept_in_float32(session: Session) -> Mapping[nn.Module, str]:
    """The outermost modules that were kept in float32, with their names."""
    return session.selection.kept


def float32_modules(session: Session | None) -> Sequence[nn.Module]:
    """All modules that the plan leaves in float32."""
    return () if session is None else list(session.selection.float32_modules)


def plain_copy(model: nn.Module) -> nn.Module:
    """A deep copy without what ``initialize`` put on the model."""
    clone = copy.deepcopy(model)
    take_off_copy(clone)
    return clone


@contextmanager
def at_level(
    model: nn.Module, optimizers: list[Optimizer], level: str, keywords: Mapping[str, Any], quiet: bool
) -> Iterator[Session]:
    """Initialise a copy of a model, and of its optimizers, for the block.

    Args:
        quiet: whether the warnings that this gives are left out.
    """
    # Of this file a part is imported with the package, which leaves these until they are needed.
    from .. import checks
    from ..plan import make_plan
    from ..settings.resolve import resolve

    name, properties = resolve(level, keywords)
    plan = make_plan(properties)
    with warnings.catch_warnings() if quiet else nullcontext():
        if quiet:
            warnings.simplefilter("ignore")
        checks.check([model], optimizers, properties, plan)
        session = Session([model], optimizers, Request(name, properties, plan, verbosity=0))
        session.apply()
    registry.add(session)
    try:
        yield session
    finally:
        session.undo()
