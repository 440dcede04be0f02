"""``mpinit convert``: a checkpoint of apex, torch.amp or mpinit in another's form.

All three are dicts with the state dicts of a model and an optimizer. They differ in three things:

- the key of the loss scale: "amp" for apex, "scaler" for torch.amp, "mpinit" for mpinit;
- its form: torch.amp has the state of a GradScaler;
- the step counts: apex's fused optimizers have them in their groups, torch's in each parameter's state.
"""

import argparse
import copy
import json
import math
import os
import pickle
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ..basics.dtypes import is_lower_precision
from ..basics.tables import counted

# The forms, and the key of the loss scale in each.
FORMATS: Final = {"mpinit": "mpinit", "apex": "amp", "torch": "scaler"}
_GRAD_SCALER: Final = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Convert a checkpoint between the forms of apex, torch.amp and mpinit. It is a dict with a model's and an "
        "optimizer's state dict and a loss scale, saved by torch.save. The result has float32 weights, and the loss "
        "scale under the key and in the form of the other: 'mpinit', 'amp' (apex) or 'scaler' (torch)."
    )
    parser.add_argument("source", metavar="IN", help="the file to read")
    parser.add_argument("target", metavar="OUT", help="the file to write")
    parser.add_argument("--to", required=True, choices=tuple(FORMATS), help="whose form it gets")
    parser.add_argument("--loss-id", type=int, default=0, metavar="N", help="which loss's scale torch gets. Default 0")
    parser.add_argument("--force", action="store_true", help="overwrite OUT where there is one")
    parser.add_argument(
        "--trust", action="store_true", help="unpickle anything in IN, which can run code: your own files"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read the checkpoint, convert it, and write the result."""
    source, target = Path(arguments.source), Path(arguments.target)
    if target.exists() and source.exists() and target.samefile(source):
        raise ValueError(f"{target} is the file to read; use another name")
    # lexists, because a broken symbolic link exists too.
    if os.path.lexists(target) and not arguments.force:
        raise ValueError(f"{target} exists already; use another name, or --force")
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {str(target.parent)!r} to write {target.name!r} in")
    result, changes = converted(_read(source, arguments.trust), arguments.to, arguments.loss_id)
    _write(result, target)
    if arguments.json:
        found = {"in": str(source), "out": str(target), "to": arguments.to, "keys": list(result), "changes": changes}
        print(json.dumps(found, indent=1))
    else:
        print("\n".join([f"{target}: {', '.join(result)}", *(f"  {line}" for line in changes)]))
    return 0


def _read(source: Path, trusts: bool) -> Any:
    if not source.is_file():
        raise ValueError(f"there is no file {str(source)!r}")
    with open(source, "rb") as file:
        # torch.save writes a zip archive, and wrote a pickle before.
        is_checkpoint = file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    if not is_checkpoint:
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


def _write(result: dict[str, Any], target: Path) -> None:
    """Write a new file beside the target, and rename it: an old file stays complete until the new one is."""
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    # Mode "x" fails if the file exists, also as a link.
    with open(unfinished, "xb") as file:
        try:
            torch.save(result, file)
            file.close()
            os.replace(unfinished, target)
        except BaseException:
            unfinished.unlink()
            raise


def converted(checkpoint: Any, to: str, loss_id: int = 0) -> tuple[dict[str, Any], list[str]]:
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
        result[key] = _in_float32(value, key, changes)
    if scale is None and not changes and not any(isinstance(value, Mapping) for value in checkpoint.values()):
        keys = ", ".join(map(repr, checkpoint)) or "none"
        raise ValueError(f"found no loss scale, model or optimizer in the file to convert; its keys are {keys}")
    if scale is None:
        keys = ", ".join(map(repr, FORMATS.values()))
        changes.append(f"no loss scale under any of {keys}: start with a fresh one")
    else:
        result[FORMATS[to]] = _rescaled(scale, found[0], to, loss_id, changes)
    return result, changes


def _in_float32(value: Any, place: str, changes: list[str]) -> Any:
    """Return an entry with its 16-bit tensors widened, and with step counts where torch's optimizers have them."""
    if isinstance(value, Mapping) and "fp32_from_fp16" in value:
        raise ValueError(
            f"{place!r} is apex's FP16_Optimizer, whose masters are the model's weights: copy the tensors of its "
            "['fp32_from_fp16'], group by group, into the parameters of a float32 model, and save "
            "model.state_dict() and its ['optimizer_state_dict']"
        )
    if isinstance(value, Mapping) and "state" in value and "param_groups" in value:
        return _with_steps(value, place, changes)
    if type(value) not in (list, tuple) and not isinstance(value, dict):
        return value
    entries: dict[Any, Any] = dict(value.items() if isinstance(value, dict) else enumerate(value))
    lower = [key for key, x in entries.items() if isinstance(x, torch.Tensor) and is_lower_precision(x.dtype)]
    if lower:
        named = f"{counted(len(lower), 'tensor was', 'tensors were')} 16-bit, the first {lower[0]!r}"
        changes.append(f"{place}: {named}; widened to float32")
    for key, x in entries.items():
        entries[key] = x.detach().float() if key in lower else _in_float32(x, f"{place}[{key!r}]", changes)
    if not isinstance(value, dict):
        return type(value)(entries.values())
    # Copied for its class and its _metadata, by which torch upgrades the entries of old modules.
    result = copy.copy(value)
    result.update(entries)
    return result


def _with_steps(state: Mapping[str, Any], place: str, changes: list[str]) -> Mapping[str, Any]:
    """Copy the step counts of apex's fused optimizers, which are in the groups, to each parameter's state."""
    per_parameter = dict(state["state"])
    steps = {index: group["step"] for group in state["param_groups"] if "step" in group for index in group["params"]}
    lacking = [index for index in steps if per_parameter.get(index) and "step" not in per_parameter[index]]
    if not lacking:
        return state
    for index in lacking:
        count = torch.tensor(float(steps[index]), dtype=torch.float32, device="cpu")
        per_parameter[index] = {**per_parameter[index], "step": count}
    receivers = counted(len(lacking), "parameter")
    changes.append(f"{place}: the step in the groups, as apex's fused optimizers have it, copied to {receivers}")
    return {**state, "state": per_parameter}


def _rescaled(scale: Any, of: str, to: str, loss_id: int, changes: list[str]) -> dict[str, Any]:
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
    shown = {name: f"{state['loss_scale']:g}" for name, state in states.items()}
    if to != "torch":
        changes.append(f"loss scale {', '.join(shown.values())} under {FORMATS[to]!r}")
        # apex knows no hysteresis.
        return {n: {name: s[name] for name in ("loss_scale", "unskipped")} for n, s in states.items()}
    chosen = f"loss_scaler{loss_id}"
    if chosen not in states:
        raise ValueError(f"there is no loss {loss_id}; the file has {', '.join(states)}: add --loss-id")
    changes.append(f"loss scale {shown.pop(chosen)} under 'scaler', with torch's default growth")
    if shown:
        changes.append(
            f"loss scale {', '.join(shown.values())} of {', '.join(shown)} is not in the file, because a GradScaler "
            "has one scale: --loss-id chooses it"
        )
    state = states[chosen]
    return {"scale": state["loss_scale"], **_GRAD_SCALER, "_growth_tracker": state["unskipped"]}
