"""``mpinit convert``: a checkpoint of apex, torch.amp or mpinit in another's form.

All three are dicts with the state dicts of a model and an optimizer. They differ in three things:

- the key of the loss scale: "amp" for apex, "scaler" for torch.amp, "mpinit" for mpinit;
- its form: torch.amp has the state of a GradScaler;
- the step counts: apex's fused optimizers have them in their groups, torch's in each parameter's state.

Other libraries' files have a loss scale under keys of their own, or inside another dict: it is found by its form.
"""

import argparse
import os
import pickle
import secrets
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ..scaling.scaler import check_state
from .output import show_json, show_text
from .state_dicts import StateDicts, is_optimizer

FORMATS: Final = ("mpinit", "apex", "torch")

_SCALER_KEY: Final = {"mpinit": "mpinit", "apex": "amp", "torch": "scaler"}
# Under these keys the state of scalers is removed when it is written in another form.
_SCALER_KEYS: Final = ("mpinit", "amp", "scaler", "grad_scaler", "loss_scaler")
_DEEPEST: Final = 6
# The keys by which the state of a torch.amp.GradScaler is known.
_GRAD_SCALER_FORM: Final = ("scale", "_growth_tracker")
_GRAD_SCALER: Final = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


class _Scaler(NamedTuple):
    """A loss scaler in a file.

    Attributes:
        state: its state in mpinit's form.
        growth: what a torch.amp.GradScaler's state has besides, if the file has it.
    """

    state: dict[str, Any]
    growth: dict[str, Any]


_Scales = dict[str, _Scaler]


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Convert a checkpoint between the forms of apex, torch.amp and mpinit. It is a dict with a model's and an "
        "optimizer's state dict and a loss scale, saved by torch.save. The result has float32 weights, and the loss "
        "scale under the key and in the form of the other: 'mpinit', 'amp' (apex) or 'scaler' (torch)."
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
        raise ValueError(f"{target} is the file to read; use another name")
    # lexists, because a broken symbolic link exists too.
    if os.path.lexists(target) and not arguments.force:
        raise ValueError(f"{target} exists already; use another name, or --force")
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
            more = "contains more than tensors and plain values; if you trust it, --trust reads it all the same"
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
    """Convert a checkpoint to the form ``to``; the checkpoint itself is not changed.

    Returns:
        The new checkpoint, and a line for each change.
    """
    if not isinstance(checkpoint, Mapping):
        raise ValueError(
            f"the file contains {type(checkpoint).__name__}, not a dict with a model and an optimizer in it"
        )
    result, changes = dict(checkpoint), list[str]()
    scales = _pop_scales(result, changes)
    states = StateDicts(changes)
    result = states.convert(result)
    if not scales and not states.are_found:
        raise ValueError(
            "found no loss scale, model or optimizer in the file to convert; its keys are "
            f"{', '.join(map(repr, checkpoint)) or 'none'}"
        )
    if scales:
        key = _SCALER_KEY[to]
        _check_free(result, key)
        result[key] = _written(scales, to, loss_id, changes)
    else:
        changes.append(
            "no loss scale found, under any key: do not call mpinit.load_state_dict, or start with a fresh scaler"
        )
    return result, changes


def _check_free(result: Mapping[str, Any], key: str) -> None:
    """Refuse to replace an entry that is not the loss scale which is converted. That of a disabled scaler is empty."""
    value = result.get(key)
    if value is not None and not (isinstance(value, Mapping) and not value):
        raise ValueError(
            f"the file has an entry {key!r} already, which is not the loss scale that was found, and the loss scale is "
            f"written there: load the file, rename {key!r}, save it by torch.save, and convert that file"
        )


def _pop_scales(result: dict[str, Any], changes: list[str]) -> _Scales:
    """Return the loss scalers' states of a checkpoint, wherever they lie, in mpinit's form.

    Those under a key of apex, torch.amp or mpinit are removed; others stay for the library that reads them.
    """
    for key in _SCALER_KEYS:
        found = _scales_of(result.get(key), repr(key))
        if found:
            del result[key]
            return found
    places = list(_found_in(result, ""))
    distinct: _Scales = {}
    for place, states in places:
        for scaler in states.values():
            distinct[f"loss_scaler{len(distinct)}"] = scaler
        scales = _shown(states)
        names = ", ".join(list(distinct)[-len(states) :])
        changes.append(f"loss scale {scales} found at {place}" + (f", as {names}" if len(places) > 1 else ""))
    return distinct


def _found_in(value: Any, place: str, depth: int = _DEEPEST) -> Iterator[tuple[str, _Scales]]:
    """Yield every place in a tree of dicts and lists where the state of scalers lies, and the states."""
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, entry in items if depth else ():
        here = f"{place}[{key!r}]"
        found = _scales_of(entry, here)
        if found:
            yield here, found
        elif isinstance(entry, (Mapping, list, tuple)):
            yield from _found_in(entry, here, depth - 1)
        if is_optimizer(entry) and _is_number(entry.get("loss_scale")):
            # fairseq's optimizers have nothing but the scale.
            state = {"loss_scale": float(entry["loss_scale"]), "unskipped": 0}
            yield f"{here}['loss_scale']", _checked({"loss_scaler0": _Scaler(state, {})}, here)


def _scales_of(state: Any, place: str) -> _Scales:
    """Return the states of scalers in mpinit's form; empty where it is none, by its form."""
    found: _Scales = {}
    if not isinstance(state, Mapping) or not state:
        return found
    if all(key in state for key in _GRAD_SCALER_FORM):
        ours = {"loss_scale": float(state["scale"]), "unskipped": int(state["_growth_tracker"])}
        ours |= {"scales": state["scales"]} if "scales" in state else {}
        found = {"loss_scaler0": _Scaler(ours, {key: state[key] for key in _GRAD_SCALER if key in state})}
    elif _is_number(state.get("cur_scale")):
        # DeepSpeed, Megatron-LM and mmcv count good updates from the last overflow.
        good = int(state.get("cur_iter", 0)) - int(state.get("last_overflow_iter", -1)) - 1
        window = max(int(state.get("scale_window", 0)), 1)
        ours = {"loss_scale": float(state["cur_scale"]), "unskipped": max(good, 0) % window}
        found = {"loss_scaler0": _Scaler(ours, _growth_of(state))}
    elif all(str(name).startswith("loss_scaler") and isinstance(value, Mapping) for name, value in state.items()):
        found = {str(name): _Scaler(dict(value), {}) for name, value in state.items()}
        if any("loss_scale" not in scaler.state for scaler in found.values()):
            return {}  # another dict with a scaler inside
    return _checked(found, place)


def _growth_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the growth of a scaler with ``scale_factor`` and ``scale_window`` as torch.amp.GradScaler names it."""
    growth: dict[str, Any] = {}
    if _is_number(state.get("scale_factor")) and float(state["scale_factor"]) > 1:
        factor = float(state["scale_factor"])
        growth |= {"growth_factor": factor, "backoff_factor": 1 / factor}
    if int(state.get("scale_window", 0)) > 0:
        growth["growth_interval"] = int(state["scale_window"])
    return growth


def _checked(found: _Scales, place: str) -> _Scales:
    for name, scaler in found.items():
        faults = check_state(scaler.state)
        if faults:
            raise ValueError(f"{place}: {name} {'; it '.join(faults)}")
    return found


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_scalar or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _shown(scales: _Scales) -> str:
    return ", ".join(f"{scaler.state['loss_scale']:g}" for scaler in scales.values())


def _written(scales: _Scales, to: str, loss_id: int, changes: list[str]) -> dict[str, Any]:
    """Return the scalers in the form ``to``, and add a line for each that is written, and for what is not."""
    key = _SCALER_KEY[to]
    if to != "torch":
        changes.append(f"loss scale {_shown(scales)} under {key!r}")
        # apex knows no hysteresis.
        names = ("loss_scale", "unskipped")
        states = {name: scaler.state for name, scaler in scales.items()}
        return states if to == "mpinit" else {n: {name: s[name] for name in names} for n, s in states.items()}
    name = f"loss_scaler{loss_id}"
    chosen = scales.get(name)
    if chosen is None:
        raise ValueError(f"there is no loss {loss_id}; the file has {', '.join(scales)}: add --loss-id")
    changes.append(f"loss scale {_shown({name: chosen})} under {key!r}")
    others = {other: scaler for other, scaler in scales.items() if other != name}
    if others:
        changes.append(
            f"loss scale {_shown(others)} of {', '.join(others)} is not in the file, because a GradScaler has one "
            "scale: --loss-id chooses it"
        )
    defaults = [f"{option} {value:g}" for option, value in _GRAD_SCALER.items() if option not in chosen.growth]
    if defaults:
        changes.append(f"{', '.join(defaults)}: torch's defaults, because the file has no other")
    state = chosen.state
    return {"scale": state["loss_scale"], **_GRAD_SCALER, **chosen.growth, "_growth_tracker": state["unskipped"]}
