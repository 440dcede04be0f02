"""``mpinit.explain``: the dtypes of the operations in one run of a model, and the reasons."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from ..basics.trees import tensors_in
from ..session import Session
from ..settings.resolve import resolve
from .copies import (
    as_initialized,
    at_level,
    copied_inputs,
    inside_wrappers,
    plain_copy,
    refuse_lazy,
    same_random_numbers,
    session_to_run,
)
from .originals import forward_refused
from .precision_report import PrecisionReport, Recording

Loss = Callable[[Any], torch.Tensor]

_ADVICE: Final = "let loss= use nothing but the output, and forward nothing but the modules of self"


def explain(
    model: nn.Module, *args: Any, loss: Loss | None = None, opt_level: str | None = None, **kwargs: Any
) -> PrecisionReport:
    """Run a model once and report the dtype of each operation, and the reason.

    It runs a copy of the model on copies of the inputs: an initialised model with its own configuration, any other at
    ``opt_level``. Weights, buffers, inputs, gradients, attributes and random numbers do not change, also if the run
    raises. The copies need as much memory as the weights, buffers and inputs. Hooks on parameters' gradients, such as
    those that step an optimizer in the backward pass, are not copied and do not run.

    Args:
        model: a module, initialised or not. Of a compiled module, and of a DistributedDataParallel, the module inside
            runs. Pass a whole initialised model, not a part of it.
        args, kwargs: the arguments of the call, with any shapes and dtypes that the model accepts.
        loss: a function from the output to a 0-dimensional loss, for the backward pass too. Default None: forward only.
        opt_level: "O0" to "O5", only for a model that is not initialised. Default None: the model runs without casts
            of mpinit.

    Returns:
        The report, for ``print(report)``, with ``.rows``, ``.flagged``, ``.to_json()``.

    Raises:
        ValueError: the level is unknown, the model is initialised already or is a part of an initialised model, or the
            model cannot be copied.
        TypeError: ``model`` is not a module, ``loss`` is not a function, or its result is not 0-dimensional.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
        >>> report = mpinit.explain(model, torch.ones(2, 4), loss=torch.sum, opt_level="O2")
        >>> [(row.module, row.op, row.why) for row in report.flagged]
        [('1', '_softmax', 'input type: float16')]
        >>> model[0].weight.dtype
        torch.float32
    """
    session = _check(model, loss, opt_level)
    model = inside_wrappers(model)
    with same_random_numbers():
        copied, (args, kwargs) = plain_copy(model, "explain the part that can be copied"), copied_inputs(args, kwargs)
        with (
            _at_level(model, session, copied, opt_level) as in_force,
            forward_refused(model, copied, "mpinit.explain", _ADVICE),
        ):
            recording = Recording(copied, in_force)
            with recording.trace:
                _run(copied, args, kwargs, loss)
    return PrecisionReport(
        model=type(model).__name__, level=in_force.opt_level if in_force is not None else "", rows=recording.rows()
    )


def _check(model: Any, loss: Any, opt_level: Any) -> Session | None:
    """Check the arguments, and return the model's session."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function from the model's output to a loss, not {type(loss).__name__}")
    session = session_to_run(inside_wrappers(model), "mpinit.explain")
    if session is not None and opt_level is not None:
        raise ValueError(
            f"the model was initialised already, in {session.describe()}: drop opt_level={opt_level!r} to see "
            "what that session does, or call mpinit.undo on it first to see what another level would do"
        )
    refuse_lazy(model)
    return session


@contextmanager
def _at_level(
    model: nn.Module, session: Session | None, copied: nn.Module, opt_level: str | None
) -> Iterator[Session | None]:
    """Initialise the copy with the model's configuration, or at a level."""
    if session is not None:
        with as_initialized(model, session, copied) as applied:
            yield applied
    elif opt_level is not None:
        with at_level([copied], [], *resolve(opt_level, {})) as applied:
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
            returned = f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"loss must return a tensor with one number, not {returned}")
        leaves = [leaf for leaf in (*model.parameters(), *tensors_in((args, kwargs))) if leaf.requires_grad]
        if value.requires_grad and leaves:
            # inputs=, so that no other tensor that the loss uses gets a gradient.
            torch.autograd.backward(value.reshape(()) if value.dim() else value, inputs=leaves)
