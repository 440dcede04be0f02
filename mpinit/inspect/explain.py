"""One run of a model, watched: which operation ran in which type, and why."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..plan import Plan
from ..session import Session
from ..settings.resolve import resolve
from . import access
from .footprint import bytes_per_parameter
from .numbers import tensors_in
from .precision_report import PrecisionReport
from .reasons import Reasons
from .recording import Recording
from .restoring import unchanged

Loss = Callable[[Any], torch.Tensor]


def explain(
    model: nn.Module,
    *args: Any,
    loss: Loss | None = None,
    opt_level: str | None = None,
    optimizer: Optimizer | None = None,
    **kwargs: Any,
) -> PrecisionReport:
    """Run a model once and report which operation ran in which type, why, and what precision costs in memory.

    The model may be initialised or not; ``opt_level`` asks what a level would do to one that is not. Afterwards
    everything is as it was, bit for bit, also where the run raises: weights, buffers (BatchNorm's statistics), inputs,
    gradients (the same tensors), attributes and modes of the modules, random numbers, loss scale, casts. Nothing stays
    installed. Hooks that run after a gradient was accumulated, such as those that step an optimizer in the backward
    pass, wait while this runs; other hooks run.

    With ``opt_level`` it is a deep copy of the model that is initialised and run, because casting a weight and
    widening it again would put another tensor into its gradient, and a failure half way would be one in your model.
    For as long as this runs, weights, buffers, gradients and inputs take their memory twice.

    Args:
        model: a module. Of one that is part of an initialised model, give the whole.
        args, kwargs: what it is called with; any shapes and dtypes that it takes.
        loss: from the output to a 0-dimensional loss, for the backward pass as well. Default: forward only.
        opt_level: "O0" to "O5", for a model that is not initialised. Default: the model as it is.
        optimizer: whose state counts in ``bytes_per_parameter``. Default: those that the model was initialised with.

    Returns:
        The report, for ``print(report)``, with ``.rows``, ``.flagged``, ``.bytes_per_parameter``, ``.to_json()``,
        ``.to_html(path)``.

    Raises:
        ValueError: an unknown level, a level for a model that is initialised already, or a model that cannot be copied.
        TypeError: what is given is no module, function or optimizer, or the loss is no 0-dimensional tensor.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
        >>> report = mpinit.explain(model, torch.ones(2, 4), loss=torch.sum, opt_level="O2")
        >>> [(row.module, row.op, row.why) for row in report.flagged]
        [('1', '_softmax', 'input type: float16')]
        >>> model[0].weight.dtype
        torch.float32
    """
    _check(model, loss, opt_level, optimizer)
    session = access.session_if_any(model)
    optimizers = [optimizer] if optimizer is not None else session.optimizers if session is not None else []
    inputs = list(tensors_in((args, kwargs)))
    sizes = bytes_per_parameter(model, session, optimizers)
    with _at_level(model, opt_level) as (target, applied), unchanged([model] if applied is None else [], inputs):
        in_force = applied or session
        plan: Plan | None = None if in_force is None else in_force.plan
        recording = Recording(target, Reasons(plan, access.float32_modules(in_force)))
        for leaf in (*target.parameters(), *(tensor for tensor in inputs if tensor.is_leaf)):
            leaf.grad = None
        with recording.trace:
            _run(target, args, kwargs, loss)
    return PrecisionReport(
        model=type(model).__name__,
        level=in_force.opt_level if in_force is not None else "",
        rows=recording.rows(),
        bytes_per_parameter=sizes,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        notes=_notes(loss, optimizers),
    )


def _check(model: Any, loss: Any, opt_level: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function from the model's output to a loss, not {type(loss).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    session = access.session_if_any(model)
    if session is not None and opt_level is not None:
        raise ValueError(
            f"the model was initialised already, in {session.describe()}: leave opt_level={opt_level!r} out to see "
            "what that does, or call mpinit.undo on it first to see what another level would do"
        )
    lazy = next((name for name, tensor in model.named_parameters() if nn.parameter.is_lazy(tensor)), None)
    if lazy is not None:
        raise ValueError(f"{lazy!r} is not initialised yet (a lazy module): run one forward pass on example data first")


@contextmanager
def _at_level(model: nn.Module, opt_level: str | None) -> Iterator[tuple[nn.Module, Session | None]]:
    """What is to be run, and the session made for it."""
    if opt_level is None:
        yield model, None
        return
    resolve(opt_level, {})
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied, which opt_level={opt_level!r} needs ({type(error).__name__}: "
            f"{error}): call mpinit.initialize on it, explain it without opt_level, and mpinit.undo it"
        ) from error
    with access.at_level(twin, [], opt_level, {}, quiet=False) as session:
        yield twin, session


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None) -> None:
    if loss is None:
        model(*args, **kwargs)
        return
    with torch.enable_grad():
        value = loss(model(*args, **kwargs))
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise TypeError(f"loss must return a tensor with one number, not {_described(value)}")
        if value.requires_grad:
            torch.autograd.backward(value.reshape(()) if value.dim() else value)


def _described(value: Any) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _notes(loss: Loss | None, optimizers: list[Optimizer]) -> tuple[str, ...]:
    notes = []
    if loss is None:
        notes.append("Forward only: give loss=, a function of the output, for the backward pass.")
    if not optimizers:
        notes.append("Without an optimizer, its state counts as nothing: give optimizer= to have it counted.")
    return tuple(notes)
