"""``mpinit convert``: a checkpoint of apex, torch.amp or mpinit in another's form.

All three are dicts with the state dicts of a model and an optimizer. They differ in three things:

- the key of the loss scale: "amp" for apex, "scaler" for torch.amp, "mpinit" for mpinit;
- its form: torch.amp has the state of a GradScaler;
- the step counts: apex's fused optimizers have them in their groups, torch's in each parameter's state.
"""

import argparse
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
from ..scaling.scaler import check_state
from .output import show_json, show_text

FORMATS: Final = ("mpinit", "apex", "torch")

_SCALER_KEY: Final = {"mpinit": "mpinit", "apex": "amp", "torch": "scaler"}
_SCALER_KEYS: Final = ("mpinit", "amp", "scaler", "grad_scaler", "loss_scaler")
_GRAD_SCALER: Final = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Turn a checkpoint (a dict with a model's and an optimizer's state dict and a loss scale, saved by torch.save) "
        "of apex, torch.amp or mpinit into another's: weights in float32, the loss scale in the form "
        " and under the key that the other has: 'mpinit', 'amp' (apex), 'scaler' (torch)."
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
    """Read the checkpoint, convert it, and write the result."""
    source, target = Path(arguments.source), Path(arguments.target)
    if target.exists() and source.exists() and target.samefile(source):
        raise ValueError(f"{target} is the file to read; give another name")
    # lexists, because a broken symbolic link exists too.
    if os.path.lexists(target) and not arguments.force:
        raise ValueError(f"{target} is there already; give another name, or --force")
    result, changes = converted(_read(source, arguments.trust), arguments.to, arguments.loss_id)
    _write(result, target)
    if arguments.json:
        show_json({"in": str(source), "out": str(target), "to": arguments.to, "keys": list(result), "changes": changes})
    else:
        show_text("\n".join([f"{target}: {', '.join(result)}", *(f"  {line}" for line in changes)]))
    return 0


def _read(source: Path, trusts: bool) -> Any:
    if not source.is_file():
        raise ValueError(f"there is no file {str(source)!r}")
    with open(source, "rb") as file:
        # torch.save writes a zip archive, and wrote a pickle before.
        is_checkpoint = file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    if not is_checkpoint:
        raise ValueError(f"{source} is no checkpoint: it was not written by torch.save")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how it was pickled, which is not the reader's doing
            return torch.load(source, map_location="cpu", weights_only=not trusts)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        if isinstance(error, pickle.UnpicklingError) and not trusts:
            more = "holds more than tensors and plain values; where it is your own, --trust reads it all the same"
            raise ValueError(f"{source} {more}") from None
        raise ValueError(f"{source} is no checkpoint that torch.save wrote: {error}") from None


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
    """Convert a checkpoint to the form ``to``.

    Returns:
        The new checkpoint, and a line for each change.
    """
    if not isinstance(checkpoint, Mapping):
        raise ValueError(f"the file holds {type(checkpoint).__name__}, not a dict with a model and an optimizer in it")
    result, changes = dict(checkpoint), list[str]()
    scales = _pop_scales(result)
    is_known = bool(scales)
    for name, value in result.items():
        if not isinstance(value, Mapping):
            continue
        if "fp32_from_fp16" in value:
            raise ValueError(
                f"{name!r} is apex's FP16_Optimizer, whose masters are the model's weights: copy the tensors of "
                f"[{name!r}]['fp32_from_fp16'], group by group, into the parameters of a float32 model, and save "
                f"model.state_dict() and [{name!r}]['optimizer_state_dict']"
            )
        if "state" in value and "param_groups" in value:
            result[name], is_known = _with_steps(value, name, changes), True
        elif any(isinstance(tensor, torch.Tensor) for tensor in value.values()):
            result[name], is_known = _in_float32(value, name, changes), True
    if not is_known:
        raise ValueError(
            "found no loss scale, model or optimizer in the file to convert; its keys are "
            f"{', '.join(map(repr, checkpoint)) or 'none'}"
        )
    if scales:
        result[_SCALER_KEY[to]] = _written(scales, to, loss_id)
        shown = ", ".join(f"{state['loss_scale']:g}" for state in scales.values())
        changes.append(f"loss scale {shown} under {_SCALER_KEY[to]!r}")
    else:
        changes.append("no loss scale found: give mpinit.load_state_dict none, or start with a fresh scaler")
    return result, changes


def _pop_scales(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Remove the loss scalers' states from a checkpoint, and return them in mpinit's form."""
    for key in _SCALER_KEYS:
        state = result.get(key)
        found: dict[str, dict[str, Any]] = {}
        if not isinstance(state, Mapping):
            continue
        if "scale" in state and "_growth_tracker" in state:
            ours = {"loss_scale": float(state["scale"]), "unskipped": int(state["_growth_tracker"])}
            found = {"loss_scaler0": ours | ({"scales": state["scales"]} if "scales" in state else {})}
        elif all(str(name).startswith("loss_scaler") for name in state):
            found = {str(name): dict(value) for name, value in state.items()}
        for name, value in found.items():
            faults = check_state(value)
            if faults:
                raise ValueError(f"{key!r}: {name} {'; it '.join(faults)}")
        if found:
            del result[key]
            return found
    return {}


def _written(scales: dict[str, dict[str, Any]], to: str, loss_id: int) -> dict[str, Any]:
    if to == "mpinit":
        return scales
    if to == "apex":
        # apex knows no hysteresis.
        return {n: {"loss_scale": s["loss_scale"], "unskipped": s["unskipped"]} for n, s in scales.items()}
    chosen = scales.get(f"loss_scaler{loss_id}")
    if chosen is None:
        raise ValueError(f"there is no loss {loss_id}; the file has {', '.join(scales)}: give --loss-id")
    return {"scale": chosen["loss_scale"], **_GRAD_SCALER, "_growth_tracker": chosen["unskipped"]}


def _in_float32(state: Mapping[str, Any], name: str, changes: list[str]) -> Mapping[str, Any]:
    lower = [key for key, value in state.items() if isinstance(value, torch.Tensor) and is_lower_precision(value.dtype)]
    if lower:
        changes.append(f"{name}: {len(lower)} tensors were 16-bit, the first {lower[0]!r}; widened to float32")
    return {**state, **{key: state[key].float() for key in lower}} if lower else state


def _with_steps(state: Mapping[str, Any], name: str, changes: list[str]) -> dict[str, Any]:
    """Copy the step counts of apex's fused optimizers, which are in the groups, to each parameter's state."""
    per_parameter = dict(state["state"])
    steps = {index: group["step"] for group in state["param_groups"] if "step" in group for index in group["params"]}
    lacking = [index for index in steps if per_parameter.get(index) and "step" not in per_parameter[index]]
    for index in lacking:
        per_parameter[index] = {**per_parameter[index], "step": torch.tensor(float(steps[index]), dtype=torch.float32)}
    if lacking:
        receivers = counted(len(lacking), "parameter")
        changes.append(f"{name}: the step in the groups, as apex's fused optimizers have it, given to {receivers}")
    return {**state, "state": per_parameter}
