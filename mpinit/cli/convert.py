"""``mpinit convert``: a checkpoint of one library as another's."""

from __future__ import annotations

import argparse
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from .formats import FORMATS, converted
from .output import show_json


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.description = (
        "Turn a checkpoint (a dict with a model's and an optimizer's state dict and a loss scale, saved by torch.save) "
        "of apex, torch.amp or mpinit into another's: weights in float32, FP16_Optimizer taken apart, the loss scale "
        "in the form and under the key that the other has: 'mpinit', 'amp' (apex), 'scaler' (torch)."
    )
    parser.add_argument("source", metavar="IN", help="the file to read")
    parser.add_argument("target", metavar="OUT", help="the file to write")
    parser.add_argument("--to", required=True, choices=FORMATS, help="whose form it gets")
    parser.add_argument("--loss-id", type=int, default=0, metavar="N", help="which loss's scale torch gets. Default 0")
    parser.add_argument("--force", action="store_true", help="overwrite OUT where there is one")
    parser.add_argument(
        "--trust", action="store_true", help="unpickle anything in IN, which can run code: your own files"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, convert, write."""
    source, target = Path(arguments.source), Path(arguments.target)
    if target.exists() and source.exists() and target.samefile(source):
        raise ValueError(f"{target} is the file to read; give another name")
    if target.exists() and not arguments.force:
        raise ValueError(f"{target} is there already; give another name, or --force")
    result, said = converted(_read(source, arguments.trust), arguments.to, arguments.loss_id)
    # Beside its place first: what was there stays whole until the new one is.
    unfinished = target.with_name(f"{target.name}.part")
    try:
        torch.save(result, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    if arguments.json:
        show_json({"in": str(source), "out": str(target), "to": arguments.to, "keys": list(result), "changes": said})
        return 0
    print(f"{target}: {', '.join(result)}")
    for line in said:
        print(f"  {line}")
    return 0


def _read(source: Path, trusts: bool) -> Any:
    if not source.is_file():
        raise ValueError(f"there is no file {str(source)!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how it was pickled, which is not the reader's doing
            return torch.load(source, map_location="cpu", weights_only=not trusts)
    except pickle.UnpicklingError:
        if trusts:
            raise ValueError(f"{source} is no file of torch.save") from None
        raise ValueError(
            f"{source} holds more than tensors and plain values, or is no file of torch.save; where it is your own, "
            "--trust reads it all the same"
        ) from None
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{source} is no file of torch.save: {error}") from None
