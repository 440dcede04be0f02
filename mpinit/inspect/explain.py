"""One run of a model, watched: which operation ran in which type, and why."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..session import Session
from ..settings.resolve import resolve
from .copies import at_level, kept_from_running, plain_copy, same_random_numbers
from .numbers import tensors_in
from .precision_report import PrecisionReport, Recording

Loss = Callable[[Any], torch.Tensor]

_ADVICE: Final = "let loss= use nothing but the output, and forward nothing but the modules of self"


def explain(
    model: nn.Module, *args: Any, loss: Loss | None = None, opt_level: str | None = None, **kwargs: Any
) -> PrecisionReport:
    """Run a model once and report which operation ran in which type, and why.

    The model may be initialised or not; ``opt_level`` asks what a level would do to one that is not. It is a copy of
    the model, with copies of its inputs, that runs: at the model's own level with all that it was initialised with, or
    at ``opt_level``. Weights, buffers, inputs, gradients, attributes and random numbers are as before, also where the
    run raises; weights, buffers and inputs take their memory twice while it runs. Hooks on parameters' gradients, such
    as those that step an optimizer in the backward pass, are not copied and do not run.

    Args:
        model: a module; of a compiled one, the model inside is run. Of one that is part of an initialised model, give
            the whole.
        args, kwargs: what it is called with; any shapes and dtypes that it takes.
        loss: from the output to a 0-dimensional loss, for the backward pass as well. Default: forward only.
        opt_level: "O0" to "O5", for a model that is not initialised. Default: the model as it is.

    Returns:
        The report, for ``print(report)``, with ``.rows``, ``.flagged``, ``.to_json()``.

    Raises:
        ValueError: an unknown level, a level for a model that is initialised already, or a model that cannot be copied.
        TypeError: what is given is no module or function, or the loss is no 0-dimensional tensor.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
        >>> report = mpinit.explain(model, torch.ones(2, 4), loss=torch.sum, opt_level="O2")
        >>> [(row.module, row.op, row.why) for row in report.flagged]
        [('1', '_softmax', 'input type: float16')]
        >>> model[0].weight.dtype
        torch.float32
    """
    _check(model, loss, opt_level)
    model = getattr(model, "_orig_mod", model)  # of a compiled model, whose copy is one of the model inside
    session = registry.of(model)
    with same_random_numbers():
        twin, args, kwargs = _copied(model, args, kwargs)
        with (
            _at_level(model, session, twin, opt_level) as in_force,
            kept_from_running(model, "mpinit.explain", _ADVICE),
        ):
            recording = Recording(twin, in_force)
            with recording.trace:
                _run(twin, args, kwargs, loss)
    return PrecisionReport(
        model=type(model).__name__, level=in_force.opt_level if in_force is not None else "", rows=recording.rows()
    )


def _check(model: Any, loss: Any, opt_level: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function from the model's output to a loss, not {type(loss).__name__}")
    session = registry.of(model)
    if session is not None and opt_level is not None:
        raise ValueError(
            f"the model was initialised already, in {session.describe()}: leave opt_level={opt_level!r} out to see "
            "what that does, or call mpinit.undo on it first to see what another level would do"
        )
    lazy = next((name for name, tensor in model.named_parameters() if nn.parameter.is_lazy(tensor)), None)
    if lazy is not None:
        raise ValueError(f"{lazy!r} is not initialised yet (a lazy module): run one forward pass on example data first")


def _copied(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    given = tensors_in((args, kwargs))
    memo: dict[int, Any] = {id(x): x.detach().clone().requires_grad_(x.requires_grad) for x in given}
    return plain_copy(model, "explain the part that can be copied"), *copy.deepcopy((args, kwargs), memo)


@contextmanager
def _at_level(
    model: nn.Module, session: Session | None, twin: nn.Module, opt_level: str | None
) -> Iterator[Session | None]:
    """Initialise the copy as the model was, or at a level."""
    if session is not None:
        level, properties = session.opt_level, session.properties
        copies = dict(zip(model.modules(), twin.modules(), strict=True))
        # Gradients of weights with masters arrive in float32; any optimizer makes them.
        stepped = {parameter for each in session.optimizers for parameter in session.managed.find(each).parameters()}
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        trained = [copied for original, copied in pairs if original in stepped]
        optimizers: list[Optimizer] = [torch.optim.SGD(trained)] if trained else []
        models = [copies[each] for each in session.models if each in copies]
        with at_level(models, optimizers, level, properties, check=False) as applied:
            yield applied
    elif opt_level is not None:
        with at_level([twin], [], *resolve(opt_level, {})) as applied:
            yield applied
    else:
        yield None


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None) -> None:
    if loss is None:
        model(*args, **kwargs)
        return
    with torch.enable_grad():
        value = loss(model(*args, **kwargs))
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            given = f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"loss must return a tensor with one number, not {given}")
        leaves = [leaf for leaf in (*model.parameters(), *tensors_in((args, kwargs))) if leaf.requires_grad]
        if value.requires_grad and leaves:
            # No other tensor that the loss may use gets a gradient.
            torch.autograd.backward(value.reshape(()) if value.dim() else value, inputs=leaves)
