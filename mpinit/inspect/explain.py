"""One run of a model, watched: which operation ran in which type, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import registry

if TYPE_CHECKING:
    from .precision_report import PrecisionReport


def explain(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
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
    widening it again would put another tensor into its gradient, and a failure half way would be one in your model;
    for as long as this runs, weights take their memory twice.

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
    session = registry.of(model)
    optimizers = [optimizer] if optimizer is not None else session.optimizers if session is not None else []
    # What watches is imported where it is asked for.
    from .watched_run import watched_run

    return watched_run(model, args, kwargs, loss, opt_level, session, optimizers)


def _check(model: Any, loss: Any, opt_level: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function from the model's output to a loss, not {type(loss).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    session = registry.of(model)
    if session is not None and opt_level is not None:
        raise ValueError(
            f"the model was initialised already, in {session.describe()}: leave opt_level={opt_level!r} out to see "
            "what that does, or call mpinit.undo on it first to see what another level would do"
        )
    lazy = next((name for name, tensor in model.named_parameters() if nn.parameter.is_lazy(tensor)), None)
    if lazy is not None:
        raise ValueError(f"{lazy!r} is not initialised yet (a lazy module): run one forward pass on example data first")
