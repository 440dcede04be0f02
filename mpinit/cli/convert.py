"""``mpinit convert``: a checkpoint of apex, torch.amp or mpinit in another's form.

All three are dicts with the state dicts of a model and an optimizer, and a loss scale: under "amp" in apex, "scaler"
(the state of a GradScaler) in torch.amp, and "mpinit" in mpinit. apex's fused optimizers count steps elsewhere.
"""

import argparse
import math
import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ..basics.tables import counted

# The forms, and the key of the loss scale in each.
FORMATS: Final = {"mpinit": "mpinit", "apex": "amp", "torch": "scaler"}


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Convert a checkpoint between the forms of apex, torch.amp and mpinit. It is a dict with a model's and an "
        "optimizer's state dict and a loss scale, saved by torch.save. The result has the loss scale under the key and "
        "in the form of the other: 'mpinit', 'amp' (apex) or 'scaler' (torch); step counts of apex's fused optimizers "
        "are where torch's optimizers have them."
    )
    parser.add_argument("source", metavar="IN", help="the file to read")
    parser.add_argument("target", metavar="OUT", help="the file to write; there must be none")
    parser.add_argument("--to", required=True, choices=tuple(FORMATS), help="whose form it gets")
    parser.add_argument(
        "--trust", action="store_true", help="unpickle anything in IN, which can run code: your own files"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read the checkpoint, convert it, and write the result."""
    source, target = Path(arguments.source), Path(arguments.target)
    # lexists, because a broken symbolic link exists too.
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already; use another name")
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {str(target.parent)!r} to write {target.name!r} in")
    result, changes = converted(_read(source, arguments.trust), arguments.to)
    with open(target, "xb") as file:
        try:
            torch.save(result, file)
        except BaseException:
            target.unlink()
            raise
    print("\n".join([f"{target}: {', '.join(result)}", *(f"  {line}" for line in changes)]))
    return 0


def _read(source: Path, trusts: bool) -> Any:
    if not source.is_file():
        raise ValueError(f"there is no file {str(source)!r}")
    with open(source, "rb") as file:
        # torch.save writes a zip archive, and wrote a pickle before.
        if file.read(2) not in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            raise ValueError(f"{source} is not a checkpoint: it was not written by torch.save")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how it was pickled, which is not the reader's doing
            return torch.load(source, map_location="cpu", weights_only=not trusts)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        if isinstance(error, pickle.UnpicklingError) and not trusts:
            more = "contains pickled objects; pass --trust to load it anyway (runs arbitrary code)"
            raise ValueError(f"{source} {more}") from None
        raise ValueError(f"{source} is not a checkpoint that torch.save wrote: {error}") from None


def converted(checkpoint: Any, to: str) -> tuple[dict[str, Any], list[str]]:
    """Convert a checkpoint to the form ``to``; the checkpoint itself is not changed.

    Returns:
        The new checkpoint, and a line for each change.
    """
    if not isinstance(checkpoint, Mapping):
        raise ValueError(f"the file contains {type(checkpoint).__name__}, not a dict with a model and an optimizer")
    result, changes = dict(checkpoint), list[str]()
    # A scaler that was disabled saves an empty dict.
    found = [form for form, key in FORMATS.items() if checkpoint.get(key)]
    if len(found) > 1:
        keys = " and ".join(repr(FORMATS[form]) for form in found)
        raise ValueError(f"the file has loss scales under {keys}: delete the entries that are not to be converted")
    scale = None if not found else result.pop(FORMATS[found[0]])
    for key, value in result.items():
        result[key] = _with_steps(value, key, changes)
    if scale is not None:
        result[FORMATS[to]] = _rescaled(scale, found[0], to, changes)
        return result, changes
    if not changes and not any(isinstance(value, Mapping) for value in checkpoint.values()):
        keys = ", ".join(map(repr, checkpoint)) or "none"
        raise ValueError(f"found no loss scale, model or optimizer in the file to convert; its keys are {keys}")
    keys = ", ".join(map(repr, FORMATS.values()))
    return result, [*changes, f"no loss scale under any of {keys}: start with a fresh one"]


def _with_steps(value: Any, place: str, changes: list[str]) -> Any:
    """Return an entry in which optimizers' step counts are where torch's optimizers have them, at any depth.

    apex's fused optimizers have them in their groups, and torch's in the state of each parameter.
    """
    if isinstance(value, Mapping) and "fp32_from_fp16" in value:
        raise ValueError(
            f"{place!r} is apex's FP16_Optimizer, whose masters are the model's weights: copy the tensors of its "
            "['fp32_from_fp16'], group by group, into the parameters of a float32 model, and save "
            "model.state_dict() and its ['optimizer_state_dict']"
        )
    if isinstance(value, Mapping) and "state" in value and "param_groups" in value:
        state, groups = dict(value["state"]), [group for group in value["param_groups"] if "step" in group]
        steps = {index: group["step"] for group in groups for index in group["params"] if state.get(index)}
        lacking = [index for index in steps if "step" not in state[index]]
        for index in lacking:
            state[index] = {**state[index], "step": torch.tensor(steps[index], dtype=torch.float32, device="cpu")}
        if lacking:
            changes.append(f"{place}: the step in the groups copied to {counted(len(lacking), 'parameter')}")
        return {**value, "state": state}
    if type(value) is dict:
        return {key: _with_steps(each, f"{place}[{key!r}]", changes) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_steps(each, f"{place}[{index}]", changes) for index, each in enumerate(value))
    return value


def _rescaled(scale: Any, of: str, to: str, changes: list[str]) -> dict[str, Any]:
    """Return the state of loss scalers in the form ``to``, and add a line for what is written and what is not."""
    key, states = FORMATS[of], dict[str, Any](scale) if isinstance(scale, Mapping) else {}
    if of == "torch":
        is_state = {"scale", "_growth_tracker"} <= states.keys()
        states = {"loss_scaler0": {"loss_scale": states.get("scale"), "unskipped": states.get("_growth_tracker")}}
    else:
        is_state = all(name.startswith("loss_scaler") and isinstance(each, Mapping) for name, each in states.items())
    if not is_state or not isinstance(scale, Mapping):
        kind = "a GradScaler" if of == "torch" else f"{of}'s loss scalers"
        raise ValueError(f"the entry {key!r} is not the state of {kind}: rename it, and convert that file")
    for name, state in states.items():
        value = state.get("loss_scale")
        if not isinstance(value, (int, float)) or not 0 < value < math.inf or "unskipped" not in state:
            raise ValueError(f"{key!r}: {name} needs 'unskipped' and a finite loss_scale above 0, not {value!r}")
    if of == to:
        return dict(scale)
    scales = [f"{state['loss_scale']:g}" for state in states.values()]
    if to != "torch":
        changes.append(f"loss scale {', '.join(scales)} under {FORMATS[to]!r}")
        # apex knows no hysteresis.
        return {n: {name: s[name] for name in ("loss_scale", "unskipped")} for n, s in states.items()}
    changes.append(f"loss scale {scales[0]} under 'scaler', with torch's default growth")
    if scales[1:]:
        changes.append(f"loss scale {', '.join(scales[1:])} is not in the file, because a GradScaler has one scale")
    growth = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    first = next(iter(states.values()))
    return {"scale": first["loss_scale"], **growth, "_growth_tracker": first["unskipped"]}
