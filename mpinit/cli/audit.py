"""``mpinit audit``: dtypes and bytes of weights, gradients and states, and weights that updates cannot change."""

import argparse
import os
import pkgutil
import sys
from typing import Any

import torch
from torch import nn

from ..basics.dtypes import parse_dtype
from ..inspect.audit import audit
from .script import run_until_first_steps


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Show, without a step: the dtype of weights, masters, gradients and optimizer state; bytes per parameter "
        "now and at each level; and the share of weights that the optimizer's steps are too small to change."
    )
    parser.add_argument(
        "factory",
        metavar="SPEC",
        help="pkg.mod:factory, without arguments; returns a model, or model and optimizer. Or SCRIPT.py ARGUMENT ..., "
        "which runs until its optimizers' first steps; options of this command come before it",
    )
    parser.add_argument("--optimizer", metavar="NAME", help="such as adamw or pkg.mod:Name; replaces that of SPEC")
    parser.add_argument(
        "--lr", type=float, metavar="RATE", help="learning rate of --optimizer. Default: that class's default"
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="cast the model first, such as to bf16. Default: as it is")


def run(arguments: argparse.Namespace) -> int:
    """Audit the model and show the report."""
    model: nn.Module
    optimizer: Any
    spec, name, rate = arguments.factory, arguments.optimizer, arguments.lr
    if spec.endswith(".py"):
        options = [f"--{each}" for each in ("optimizer", "lr", "dtype") if getattr(arguments, each) is not None]
        if options:
            raise ValueError(f"{', '.join(options)}: a script makes its own model and optimizer; omit it")
        model, optimizer = run_until_first_steps(spec, arguments.rest)
    else:
        model, optimizer = make(spec)
    if arguments.dtype is not None:
        model = model.to(parse_dtype(arguments.dtype))
    if name is not None:
        if optimizer is not None:
            print(f"--optimizer {name} replaces the {type(optimizer).__name__} of {spec}", file=sys.stderr)
        known = {key.lower(): getattr(torch.optim, key) for key in dir(torch.optim)}
        kind: Any = load(name) if ":" in name else known.get(name.lower())
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ValueError(f"{name!r} is not an optimizer of torch.optim, such as adamw; name others as pkg.mod:Name")
        optimizer = kind(model.parameters(), **({} if rate is None else {"lr": rate}))
    elif rate is not None:
        raise ValueError(
            f"--lr {rate:g} is the learning rate of --optimizer: add it, such as --optimizer adamw. An optimizer that "
            "SPEC returns has the learning rate that SPEC sets"
        )
    print(audit(model, optimizer))
    return 0


def load(name: str) -> Any:
    """Import the object that ``pkg.mod:attribute`` names; search the working directory too."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return pkgutil.resolve_name(name)


def make(name: str) -> tuple[nn.Module, Any]:
    """Call a factory with a fixed seed; return the model, and its optimizer or None."""
    factory = load(name)
    if not callable(factory):
        raise ValueError(f"{name} is an object of {type(factory).__name__}, not a function that returns a model")
    torch.manual_seed(0)
    made = factory if isinstance(factory, nn.Module) else factory()
    model, optimizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned {type(model).__name__}, not a torch.nn.Module, nor one with its optimizer")
    return model, optimizer
