"""``mpinit convert``: a checkpoint of apex, torch.amp or mpinit in another's form.

All three are dicts with the state dicts of a model and an optimizer, and a loss scale: under "amp" in apex, "scaler"
(the state of a GradScaler) in torch.amp, and "mpinit" in mpinit. apex's fused optimizers count steps elsewhere.
"""

import argparse
import os
import pickle
from collections.abc import Mapping
from typing import Any, Final

import torch

from ..basics.tables import counted
from ..config.loss_scale import check_scale

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
    with open(arguments.target, "xb") as file:
        try:
            result, changes = converted(_read(arguments.source, arguments.trust), arguments.to)
            torch.save(result, file)
        except BaseException:
            os.unlink(arguments.target)
            raise
    print("\n".join([f"{arguments.target}: {', '.join(result)}", *(f"  {line}" for line in changes)]))
    return 0


def _read(source: str, trusts: bool) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=not trusts)
    except pickle.UnpicklingError:
        if trusts:
            raise
        raise ValueError(
            f"{source} contains pickled objects, or is not a checkpoint; pass --trust to load it anyway (runs "
            "arbitrary code)"
        ) from None


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
    if scale is None:
        keys = ", ".join(map(repr, FORMATS.values()))
        changes.append(f"no loss scale under any of {keys}: start with a fresh one")
    else:
        result[FORMATS[to]] = _rescaled(scale, found[0], to, changes)
    return result, changes


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
    try:
        if of == "torch":
            found = [(scale["scale"], scale["_growth_tracker"])]
        else:
            found = [(each["loss_scale"], each["unskipped"]) for each in scale.values()]
    except (AttributeError, LookupError, TypeError):
        kind = "a GradScaler" if of == "torch" else f"{of}'s loss scalers"
        raise ValueError(
            f"the entry {FORMATS[of]!r} is not the state of {kind}: rename it, and convert that file"
        ) from None
    scales = [f"{check_scale(value):g}" for value, _ in found]
    if of == to:
        return dict(scale)
    if to != "torch":
        changes.append(f"loss scale {', '.join(scales)} under {FORMATS[to]!r}")
        # apex knows no hysteresis.
        return {f"loss_scaler{n}": {"loss_scale": s, "unskipped": good} for n, (s, good) in enumerate(found)}
    changes.append(f"loss scale {scales[0]} under 'scaler', with torch's default growth")
    if scales[1:]:
        changes.append(f"loss scale {', '.join(scales[1:])} is not in the file, because a GradScaler has one scale")
    growth = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    return {"scale": found[0][0], **growth, "_growth_tracker": found[0][1]}
