"""Copies of a model and its optimizer, which a report runs in place of the originals, at any level."""

import copy
import functools
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import checks, registry
from ..basics.modules import ModelIndex
from ..basics.patching import Undo, UndoStack
from ..basics.trees import tensors_in
from ..model.forward import unpatch_copy
from ..plan import make_plan
from ..session import Request, Session
from ..settings.properties import Properties
from ..settings.resolve import Settings
from ..torch_internals.native_autocast import device_types


def inside_wrappers(model: nn.Module) -> nn.Module:
    """Return the module inside of torch.compile and DistributedDataParallel: a copy needs no graphs and no ranks."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def refuse_lazy(model: nn.Module) -> None:
    """Raise a ValueError if a parameter of the model has no shape yet."""
    lazy = next((name for name, tensor in model.named_parameters() if nn.parameter.is_lazy(tensor)), None)
    if lazy is not None:
        raise ValueError(f"{lazy!r} is not initialised yet (a lazy module): run one forward pass on example data first")


def session_to_run(model: nn.Module, tool: str) -> Session | None:
    """Return the session with whose casts a model runs; None if it has none.

    Raises:
        ValueError: the module is a part of an initialised model: the model's own forward casts what its parts receive.
    """
    session = registry.sharing(model)
    own = set(model.modules())
    if session is not None and not any(each in own for each in session.models):
        raise ValueError(
            f"this {type(model).__name__} is a part of an initialised model, in {session.describe()}, and does not run "
            f"by itself as it runs there: pass {tool} the whole model, and the model's inputs"
        )
    return session


def plain_copy(model: nn.Module, advice: str) -> nn.Module:
    """Make a deep copy without the patches of ``initialize``."""
    try:
        clone = copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and only a copy would be run: "
            f"{advice}"
        ) from error
    unpatch_copy(clone)
    return clone


def copied_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy the arguments of a call, because a forward may write to its inputs.

    Raises:
        ValueError: an argument cannot be copied.
    """
    tensors = tensors_in((args, kwargs))
    memo: dict[int, Any] = {id(x): x.detach().clone().requires_grad_(x.requires_grad) for x in tensors}
    try:
        return copy.deepcopy((args, kwargs), memo)
    except Exception as error:
        raise ValueError(
            f"the inputs cannot be copied ({type(error).__name__}: {error}), and only copies are passed to the model: "
            "pass tensors, or containers of tensors"
        ) from error


def copy_of_optimizer(optimizer: Optimizer, copies: Mapping[Any, Any]) -> Optimizer:
    """Copy an optimizer without its state, for copies of its parameters."""
    kind = type(optimizer)
    copied: Optimizer = kind.__new__(kind)
    memo: dict[int, Any] = {id(optimizer): copied, id(optimizer.state): defaultdict(dict)}
    memo |= {id(entry): copies[entry] for group in optimizer.param_groups for entry in group["params"]}
    for name, value in vars(optimizer).items():
        # A callable in the place of a method (initialize, a scheduler, accelerate) would run the original's.
        if callable(value) and hasattr(kind, name):
            continue
        setattr(copied, name, OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo))
    return copied


@contextmanager
def at_level(
    models: list[nn.Module], optimizers: list[Optimizer], level: str, properties: Properties, check: bool = True
) -> Iterator[Session]:
    """Initialise copies of models and their optimizers inside the block, without warnings."""
    plan = make_plan(properties)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index = checks.check(models, optimizers, plan)[0] if check else ModelIndex(models)
        session = Session(models, optimizers, Request(level, plan, Settings(verbosity=0)))
        with UndoStack() as failed:
            session.apply(index, failed)
            registry.add(session)
            session.begin()
    # Its operations are not the model's, and its warnings would be about the copy.
    session.forward_guard.inputs = None
    try:
        yield session
    finally:
        session.undo()


@contextmanager
def as_initialized(model: nn.Module, session: Session, copied: nn.Module) -> Iterator[Session]:
    """Initialise a copy of a model with the configuration of the model's session inside the block."""
    copies = dict(zip(model.modules(), copied.modules(), strict=True))
    # Gradients of weights with masters are float32. SGD replaces the optimizers: any makes masters. Weights keep their
    # masters where the optimizer was freed.
    stepped: set[torch.Tensor] = {master.weight for master in session.masters}
    for each in session.optimizers:
        stepped.update(session.managed.find(each).parameters())
    pairs = zip(model.parameters(), copied.parameters(), strict=True)
    trained = [parameter for original, parameter in pairs if original in stepped]
    optimizers: list[Optimizer] = [torch.optim.SGD(trained)] if trained else []
    models = [copies[each] for each in session.models if each in copies]
    with at_level(models, optimizers, session.opt_level, session.properties, check=False) as applied:
        yield applied


@contextmanager
def same_random_numbers() -> Iterator[Undo]:
    """Restore the random generators of torch (all devices in use), Python and numpy (if imported) after the block.

    Yields:
        A function that restores the generators to their state at the beginning.
    """
    undos = [functools.partial(random.setstate, random.getstate())]
    undos.append(functools.partial(torch.set_rng_state, torch.get_rng_state()))
    for device in device_types()[1:]:
        module: Any = torch.get_device_module(device)
        if module.is_initialized():
            undos.append(functools.partial(module.set_rng_state_all, module.get_rng_state_all()))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        undos.append(functools.partial(numpy.random.set_state, numpy.random.get_state()))

    def restore() -> None:
        for undo in undos:
            undo()

    try:
        yield restore
    finally:
        restore()
