"""``mpinit explain``: the dtypes of a model's operations, and the reasons."""

import argparse
import importlib
import os
import sys
from typing import Any

import torch
from torch import nn

from ..basics.dtypes import dtype_name
from ..config.properties import OPT_LEVELS
from ..inspect.explain import explain


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Run a model once on random numbers, as it would be at a level, and show which operation runs in which type, "
        "why, and what is cast."
    )
    parser.add_argument("factory", metavar="pkg.mod:factory", help="a function without arguments that returns a model")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE[:BELOW]",
        help="one of the model's inputs, such as 2x3x224x224, or 2x128:1000 for whole numbers below 1,000; repeat it "
        "for each input. Numbers are random",
    )
    parser.add_argument("--loss", metavar="pkg.mod:fn", help="a function of the output that returns the loss")
    parser.add_argument("--device", default="cpu", help="such as cuda. Default cpu")
    parser.add_argument(
        "--opt-level", default="O1", metavar="LEVEL", help=f"any of {', '.join(OPT_LEVELS)}. Default O1"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the model and show the report."""
    model = make(arguments.factory)[0].to(arguments.device)
    chance = torch.Generator().manual_seed(0)
    inputs = [make_input(spec, chance).to(arguments.device) for spec in arguments.input]
    loss = None if arguments.loss is None else load(arguments.loss)
    try:
        report = explain(model, *inputs, loss=loss, opt_level=arguments.opt_level)
    except (RuntimeError, IndexError, TypeError) as error:
        shapes = ", ".join(f"{dtype_name(x.dtype)} {'x'.join(map(str, x.shape))}" for x in inputs)
        error.add_note(
            f"the model ran on {shapes or 'no input'}: add --input once for each input, such as --input 2x3x224x224, "
            "or --input 2x24:50 for token numbers below 50"
        )
        raise
    print(report.to_json() if arguments.json else report)
    return 0


def load(name: str) -> Any:
    """Import the object that ``pkg.mod:attribute`` names; search the working directory too."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ValueError(f"{name!r} names no object; write the module, a colon and the name, such as models.cnn:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the user's module imports
        raise ValueError(f"there is no module {error.name!r}, neither installed nor in {os.getcwd()}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module_name} has no {path!r}")
        found = getattr(found, part)
    return found


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


def make_input(spec: str, generator: torch.Generator) -> torch.Tensor:
    """Make a random tensor from the text of ``--input``."""
    sizes, colon, below = spec.partition(":")
    try:
        shape, limit = [int(size) for size in sizes.split("x")], int(below) if colon else 0
    except ValueError:
        raise ValueError(
            f"--input {spec!r} is no input; write sizes joined by x, such as 2x3x224x224, and for whole numbers a "
            "limit, such as 2x128:1000"
        ) from None
    if colon:
        return torch.randint(limit, shape, generator=generator, dtype=torch.int64, device="cpu")
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
