"""What is named on the command line: models, losses, optimizers, inputs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

_DTYPES: Final = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}


def describe_model(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which model is run on what."""
    parser.add_argument("factory", metavar="pkg.mod:factory", help="a function without arguments that returns a model")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE[:DTYPE[:BELOW]]",
        help="one of the model's inputs, without its batch, such as 3x224x224, or 128:int64:1000 for whole numbers "
        "below 1,000; give it once for each input. Numbers are random",
    )
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="size of the batch; 0 for none. Default 2")
    parser.add_argument(
        "--loss",
        metavar="pkg.mod:fn",
        help='a function of the output that returns the loss; "mean" for its mean square',
    )
    parser.add_argument("--device", default="cpu", help="such as cuda. Default cpu")


def load(name: str) -> Any:
    """The object that ``pkg.mod:attribute`` names; modules in the working directory are found.

    Raises:
        ValueError: there is none.
    """
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ValueError(f"{name!r} names no object; write the module, a colon and the name, such as models.cnn:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the user's own needs
        raise ValueError(f"there is no module {error.name!r}, neither installed nor in {os.getcwd()}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module_name} has no {path!r}")
        found = getattr(found, part)
    return found


def make_model(name: str, device: str) -> nn.Module:
    """Call a factory, with the same random numbers each time."""
    factory = load(name)
    torch.manual_seed(0)
    model = factory if isinstance(factory, nn.Module) else factory()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
    return model.to(device)


def make_loss(name: str | None) -> Callable[[Any], torch.Tensor] | None:
    """The loss named; None where none is."""
    if name is None:
        return None
    if name == "mean":
        return mean_square
    loss = load(name)
    if not callable(loss):
        raise ValueError(f"{name} is no function of the output, but {type(loss).__name__}")
    # A loss class such as torch.nn:MSELoss needs targets; what is asked for is a function of the output alone.
    return loss  # type: ignore[no-any-return]


def mean_square(output: Any) -> torch.Tensor:
    """The mean square of the first floating tensor in an output.

    Example:
        >>> mean_square({"logits": torch.full((2, 2), 3.0)})
        tensor(9.)
    """
    if isinstance(output, torch.Tensor):
        return output.float().square().mean()
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    for value in values:
        if not isinstance(value, torch.Tensor) or value.is_floating_point():
            return mean_square(value)
    raise ValueError(f"the model returned {type(output).__name__}, of which no mean can be taken; give --loss")


def make_inputs(specs: list[str], batch: int, device: str) -> list[torch.Tensor]:
    """Random tensors as :func:`describe_model`'s ``--input`` says.

    Example:
        >>> [(x.shape, x.dtype) for x in make_inputs(["3x4", "5:int64:9"], 2, "cpu")]
        [(torch.Size([2, 3, 4]), torch.float32), (torch.Size([2, 5]), torch.int64)]
    """
    generator = torch.Generator().manual_seed(0)
    return [_input(spec, batch, generator).to(device) for spec in specs]


def _input(spec: str, batch: int, generator: torch.Generator) -> torch.Tensor:
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
        return torch.randn(shape, generator=generator, dtype=dtype)
    limit = 2 if dtype is torch.bool else int(below or 2)
    return torch.randint(limit, shape, generator=generator).to(dtype)


def make_optimizer(name: str, model: nn.Module, lr: float | None) -> torch.optim.Optimizer:
    """An optimizer of torch.optim by its name, in any case, or one that ``pkg.mod:name`` names.

    Example:
        >>> type(make_optimizer("adamw", nn.Linear(2, 2), 0.1)).__name__
        'AdamW'
    """
    known = {key.lower(): getattr(torch.optim, key) for key in dir(torch.optim)}
    kind = load(name) if ":" in name else known.get(name.lower())
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"{name!r} is no optimizer of torch.optim, such as sgd or adamw; others are pkg.mod:Name")
    made: Any = kind
    optimizer: torch.optim.Optimizer = made(model.parameters()) if lr is None else made(model.parameters(), lr=lr)
    return optimizer
