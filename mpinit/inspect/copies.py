"""Copies of a model and its optimizer, which a report runs in place of the originals, at any level."""

import copy
import fnmatch
import functools
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from .. import amp, registry
from ..autocast.thread_flags import device_types
from ..basics.trees import tensors_in
from ..config.plan import CastPolicy
from ..initialization import start
from ..optimizer.members import parameters_of
from ..session import Session


def inside_wrappers(model: nn.Module) -> nn.Module:
    """Return the module inside of torch.compile and DistributedDataParallel: a copy needs no graphs and no ranks."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


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
    models: list[nn.Module],
    optimizers: list[Optimizer],
    level: Any,
    keywords: Mapping[str, Any] | None = None,
    cast_policy: CastPolicy = "torch",
) -> Iterator[None]:
    """Initialise copies of models and their optimizers inside the block, without warnings and log lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start(models, optimizers, level, {**(keywords or {}), "verbosity": 0}, cast_policy=cast_policy)
    try:
        yield
    finally:
        amp.undo(models[0])


@contextmanager
def as_initialized(model: nn.Module, session: Session, copied: nn.Module) -> Iterator[None]:
    """Initialise a copy of a model with the configuration of the model's session inside the block."""
    copies = dict(zip(model.modules(), copied.modules(), strict=True))
    # Only weights of an optimizer have masters. SGD replaces the optimizers: any makes masters, and a weight keeps its
    # master where the optimizer was freed.
    stepped = set(parameters_of(session.optimizers))
    pairs = zip(model.parameters(), copied.parameters(), strict=True)
    trained = [own for p, own in pairs if p in stepped or session.view.master_of(p) is not None]
    optimizers: list[Optimizer] = [torch.optim.SGD(trained)] if trained else []
    models = [copies[each] for each in session.models if each in copies]
    properties = session.properties
    # None would be the level's value.
    keywords = {
        name: "None" if value is None else value for name, value in properties if name in properties.model_fields_set
    }
    names = [name for each in models for name, _ in (*each.named_modules(), *each.named_parameters())]
    # Patterns for another model of the session match nothing here.
    for keyword, entries in (("keep_fp32", properties.keep_fp32), ("compute_fp32", properties.compute_fp32)):
        keywords[keyword] = [kept for kept in entries if not isinstance(kept, str) or fnmatch.filter(names, kept)]
    with at_level(models, optimizers, session.opt_level, keywords, session.view.cast_policy):
        yield


@contextmanager
def forward_refused(model: nn.Module, copied: nn.Module, tool: str, advice: str) -> Iterator[None]:
    """Raise a ValueError in the block if any module of the original is called; scripted modules are not checked.

    A lambda, a hook or a closure of the model's may refer to a module of the original, which a copy of it then runs.
    """

    def refuse(module: nn.Module, args: Any) -> NoReturn:
        what = "the model itself" if module is model else f"{names[module]!r} of the model itself"
        raise ValueError(f"{what} was run inside {tool}, and not the copy of it: {advice}. Nothing was changed")

    names = {module: name for name, module in model.named_modules()}
    # A model may share modules with its copies, through a __deepcopy__ of its own.
    shared = set(copied.modules())
    with ExitStack() as hooks:
        for module in names:
            if module not in shared and not isinstance(module, torch.jit.ScriptModule):
                hooks.callback(module.register_forward_pre_hook(refuse, prepend=True).remove)
        yield


@contextmanager
def same_random_numbers() -> Iterator[Callable[[], None]]:
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
