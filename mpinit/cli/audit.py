"""``mpinit audit``: dtypes and bytes of weights, gradients and states, and weights that updates cannot change."""

import argparse
import json
from typing import Any

import torch
from torch import nn

from ..basics.dtypes import parse_dtype
from ..inspect.audit import PARAMETER_NUMBERS, audit
from .explain import load, make
from .output import show_json, show_table, show_text
from .script import is_script, run_until_first_steps


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
    parser.add_argument("--optimizer", metavar="NAME", help="where SPEC returns none, such as adamw or pkg.mod:Name")
    parser.add_argument(
        "--lr", type=float, metavar="RATE", help="learning rate of --optimizer. Default: that class's default"
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="cast the model first, such as to bf16. Default: as it is")


def run(arguments: argparse.Namespace) -> int:
    """Audit the model and show the report."""
    if is_script(arguments.factory):
        model, optimizer = _from_script(arguments)
    else:
        if arguments.lr is not None and arguments.optimizer is None:
            raise ValueError(
                f"--lr {arguments.lr:g} is the learning rate of --optimizer: add it, such as --optimizer adamw. An "
                "optimizer that SPEC returns has the learning rate that SPEC sets"
            )
        model, optimizer = make(arguments.factory)
    if arguments.dtype is not None:
        model = model.to(parse_dtype(arguments.dtype))
    if arguments.optimizer is not None:
        optimizer = make_optimizer(arguments.optimizer, model, arguments.lr)
    report = audit(model, optimizer)
    if arguments.json:
        show_json(json.loads(report.to_json()))
        return 0
    parameters, sizes = report.tables()
    show_table("What is stored, what moves least first", *parameters, numbers=PARAMETER_NUMBERS)
    show_table("Memory in training", *sizes, numbers=range(1, 6))
    show_text(report.advice)
    return 0


def _from_script(arguments: argparse.Namespace) -> tuple[nn.Module, Any]:
    options = [f"--{name}" for name in ("optimizer", "lr", "dtype") if getattr(arguments, name) is not None]
    if options:
        raise ValueError(f"{', '.join(options)}: a script makes its own model and optimizer; omit it")
    return run_until_first_steps(arguments.factory, arguments.rest)


def make_optimizer(name: str, model: nn.Module, rate: float | None = None) -> torch.optim.Optimizer:
    """Make an optimizer of torch.optim by its name, in upper or lower case, or of the class ``pkg.mod:name``."""
    known = {key.lower(): getattr(torch.optim, key) for key in dir(torch.optim)}
    kind = load(name) if ":" in name else known.get(name.lower())
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"{name!r} is no optimizer of torch.optim, such as sgd or adamw; others are pkg.mod:Name")
    make_it: Any = kind
    optimizer: torch.optim.Optimizer = make_it(model.parameters(), **({} if rate is None else {"lr": rate}))
    return optimizer
