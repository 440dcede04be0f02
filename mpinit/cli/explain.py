"""``mpinit explain``: the dtypes of a model's operations, and the reasons."""

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from ..inspect.explain import explain
from ..settings.properties import OPT_LEVELS
from .output import WIDTH, show_text, wrapped

_DTYPES: Final = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}
_SHORT: Final = {dtype: name for name, dtype in _DTYPES.items()}
_INPUT_HINT: Final = (
    "add --input once for each input, without the batch, such as --input 3x224x224, or --input 24:int64:50 for token "
    "numbers below 50"
)


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Run a model once on random numbers, as it would be at a level, and show which operation runs in which type, "
        "why, and what is cast."
    )
    parser.add_argument("factory", metavar="pkg.mod:factory", help="a function without arguments that returns a model")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE[:DTYPE[:BELOW]]",
        help="one of the model's inputs, without its batch, such as 3x224x224, or 128:int64:1000 for whole numbers "
        "below 1,000; repeat it for each input. Numbers are random",
    )
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="size of the batch; 0 for none. Default 2")
    parser.add_argument(
        "--loss", metavar="pkg.mod:fn", help='function of the output that returns the loss; "mean" for its mean square'
    )
    parser.add_argument("--device", default="cpu", help="such as cuda. Default cpu")
    parser.add_argument(
        "--opt-level", default="O1", metavar="LEVEL", help=f"any of {', '.join(OPT_LEVELS)}. Default O1"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the model and show the report."""
    model = make(arguments.factory)[0].to(arguments.device)
    chance = torch.Generator().manual_seed(0)
    inputs = [make_input(spec, arguments.batch, chance).to(arguments.device) for spec in arguments.input]
    loss = None if arguments.loss is None else mean_square if arguments.loss == "mean" else load(arguments.loss)
    _check_count(model, inputs)
    try:
        report = explain(model, *inputs, loss=loss, opt_level=arguments.opt_level)
    except (RuntimeError, IndexError) as error:
        if arguments.traceback:
            raise
        shapes = ", ".join(f"{_SHORT[x.dtype]} {'x'.join(map(str, x.shape))}" for x in inputs)
        raise ValueError(f"{_sentence(error)}; the model ran on {shapes or 'nothing'}: {_INPUT_HINT}") from error
    print(report.to_json()) if arguments.json else _show(str(report))
    return 0


def _check_count(model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Refuse fewer inputs than the model's forward requires, before it runs."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # a forward without a signature, such as one in C++
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    missing = [p.name for p in positional[len(inputs) :] if p.default is p.empty]
    if missing:
        names = ", ".join(map(repr, missing))
        raise ValueError(f"the forward of {type(model).__name__} also requires {names}: {_INPUT_HINT}")


def _sentence(error: BaseException) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__


def _show(report: str) -> None:
    """Print a report; print a reason below its operation if the line would be too long."""
    last = 0
    # Replace the arguments of mpinit.explain that the report names by the options of this command.
    for line in re.sub(r"\.rows\b", "--json", re.sub(r"\bloss=", "--loss", report)).splitlines():
        if line and not line.strip("- "):
            last = line.rindex(" ") + 1
            line = line[:WIDTH]
        elif len(line) > WIDTH and last > 2 and line[last - 2 : last] == "  ":
            show_text(line[:last].rstrip())
            line = "\n".join(wrapped(line[last:], WIDTH, indent="    "))
        show_text(line) if line else print()


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
    """Call a factory with a fixed seed.

    Returns:
        The model, and its optimizer or None.
    """
    factory = load(name)
    torch.manual_seed(0)
    made = factory if isinstance(factory, nn.Module) else factory()
    model, optimizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned {type(model).__name__}, not a torch.nn.Module, nor one with its optimizer")
    return model, optimizer


def mean_square(output: Any) -> torch.Tensor:
    """Compute the mean square of the first floating tensor in an output."""
    if isinstance(output, torch.Tensor):
        return output.float().square().mean()
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    for value in values:
        if not isinstance(value, torch.Tensor) or value.is_floating_point():
            return mean_square(value)
    raise ValueError(f"the model returned {type(output).__name__}, which has no mean; use --loss with a function of it")


def make_input(spec: str, batch: int, generator: torch.Generator) -> torch.Tensor:
    """Make a random tensor from the text of ``--input``."""
    shape_text, _, rest = spec.partition(":")
    dtype_text, _, below = rest.partition(":")
    dtype = _DTYPES.get(dtype_text or "float32")
    sizes = [size for size in shape_text.lower().split("x") if size]
    if dtype is None or not all(size.isdigit() for size in sizes) or (below and not below.isdigit()):
        raise ValueError(
            f"--input {spec!r} is no input; write sizes joined by x, then a dtype ({', '.join(_DTYPES)}) and for whole "
            "numbers a limit, such as 3x224x224 or 128:int64:1000"
        )
    shape = ([batch] if batch else []) + [int(size) for size in sizes]
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
    limit = 2 if dtype is torch.bool else int(below or 2)
    return torch.randint(limit, shape, generator=generator, dtype=torch.int64, device="cpu").to(dtype)
