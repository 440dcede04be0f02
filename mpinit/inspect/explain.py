"""``mpinit.explain``: the dtypes of the operations in one run of a model, and the reasons."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..basics.trees import tensors_in
from ..session import Session
from ..settings.resolve import resolve
from .copies import at_level, kept_from_running, plain_copy, same_random_numbers
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
        model: a module, initialised or not. Of a compiled module, the module inside is run. Pass a whole initialised
            model, not a part of it.
        args, kwargs: the arguments of the call, with any shapes and dtypes that the model accepts.
        loss: a function from the output to a 0-dimensional loss, for the backward pass too. Default None: forward only.
        opt_level: "O0" to "O5", only for a model that is not initialised. Default None: the model runs without casts
            of mpinit.

    Returns:
        The report, for ``print(report)``, with ``.rows``, ``.flagged``, ``.to_json()``.

    Raises:
        ValueError: the level is unknown, the model is initialised already, or it cannot be copied.
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
    _check(model, loss, opt_level)
    model = getattr(model, "_orig_mod", model)  # a compiled model: copy the model inside
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
            f"the model was initialised already, in {session.describe()}: drop opt_level={opt_level!r} to see "
            "what that session does, or call mpinit.undo on it first to see what another level would do"
        )
    lazy = next((name for name, tensor in model.named_parameters() if nn.parameter.is_lazy(tensor)), None)
    if lazy is not None:
        raise ValueError(f"{lazy!r} is not initialised yet (a lazy module): run one forward pass on example data first")


def _copied(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    tensors = tensors_in((args, kwargs))
    memo: dict[int, Any] = {id(x): x.detach().clone().requires_grad_(x.requires_grad) for x in tensors}
    return plain_copy(model, "explain the part that can be copied"), *copy.deepcopy((args, kwargs), memo)


@contextmanager
def _at_level(
    model: nn.Module, session: Session | None, twin: nn.Module, opt_level: str | None
) -> Iterator[Session | None]:
    """Initialise the copy with the model's configuration, or at a level."""
    if session is not None:
        level, properties = session.opt_level, session.properties
        copies = dict(zip(model.modules(), twin.modules(), strict=True))
        # Gradients of weights with masters are float32. SGD replaces the optimizers: any makes masters. Weights
        # keep their masters where the optimizer was freed.
        stepped: set[torch.Tensor] = {master.weight for master in session.masters}
        for each in session.optimizers:
            stepped.update(session.managed.find(each).parameters())
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
            returned = f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"loss must return a tensor with one number, not {returned}")
        leaves = [leaf for leaf in (*model.parameters(), *tensors_in((args, kwargs))) if leaf.requires_grad]
        if value.requires_grad and leaves:
            # inputs=, so that no other tensor that the loss uses gets a gradient.
            torch.autograd.backward(value.reshape(()) if value.dim() else value, inputs=leaves)
