"""Checkpoints of apex, torch.amp and mpinit: what is in one, and the same in another's form.

All three are dicts with a model's and an optimizer's state dict, and differ in three things: where the loss scale is
(apex "amp", torch.amp "scaler", mpinit "mpinit"), whether it is a GradScaler's state, and what apex's own optimizers
keep elsewhere (FusedAdam's step in its groups; FP16_Optimizer's masters, scaler and inner state in one).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from ..basics.dtypes import is_lower_precision
from ..basics.tables import counted
from ..scaling.scaler import check_state

FORMATS: Final = ("mpinit", "apex", "torch")

_SCALER_KEY: Final = {"mpinit": "mpinit", "apex": "amp", "torch": "scaler"}
_SCALER_KEYS: Final = ("mpinit", "amp", "scaler", "grad_scaler", "loss_scaler")
_GRAD_SCALER: Final = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
_FP16_OPTIMIZER: Final = ("loss_scaler", "optimizer_state_dict", "fp32_from_fp16")


def converted(checkpoint: Any, to: str, loss_id: int = 0) -> tuple[dict[str, Any], list[str]]:
    """A checkpoint in another's form.

    Args:
        checkpoint: what was loaded from a file; not changed.
        to: "mpinit", "apex" or "torch".
        loss_id: which loss's scale a form with a single one gets.

    Returns:
        The new checkpoint, and a line for each thing that differs.

    Raises:
        ValueError: there is nothing in it that could be converted, or it does not fit together.

    Example:
        >>> saved = {"model": {}, "scaler": {"scale": 8.0, "_growth_tracker": 3}}
        >>> converted(saved, "mpinit")[0]["mpinit"]
        {'loss_scaler0': {'loss_scale': 8.0, 'unskipped': 3}}
    """
    if not isinstance(checkpoint, Mapping):
        raise ValueError(f"the file holds {type(checkpoint).__name__}, not a dict with a model and an optimizer in it")
    result, said = dict(checkpoint), list[str]()
    scales = _take_wrapped_optimizers(result, said)
    scales = _take_scales(result) or scales
    for name, value in result.items():
        if _is_optimizer_state(value):
            result[name] = _with_steps(value, name, said)
        elif _is_model_state(value):
            result[name] = _in_float32(value, name, said)
    known = (_is_model_state(value) or _is_optimizer_state(value) for value in result.values())
    if not scales and not any(known):
        raise ValueError(
            "found no loss scale, model or optimizer in the file to convert; its keys are "
            f"{', '.join(map(repr, checkpoint)) or 'none'}"
        )
    if scales:
        result[_SCALER_KEY[to]] = _written(scales, to, loss_id)
        shown = ", ".join(f"{state['loss_scale']:g}" for state in scales.values())
        said.append(f"loss scale {shown} under {_SCALER_KEY[to]!r}")
    else:
        said.append("no loss scale found: give mpinit.load_state_dict none, or start with a fresh scaler")
    return result, said


# -- loss scales ------------------------------------------------------------------------------------------------------


def _take_scales(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The loss scalers' states, taken out of a checkpoint, as mpinit's."""
    for key in _SCALER_KEYS:
        state = result.get(key)
        if not isinstance(state, Mapping):
            continue
        found = _as_ours(state)
        if found:
            for name, value in found.items():
                faults = check_state(value)
                if faults:
                    raise ValueError(f"{key!r}: {name} {'; it '.join(faults)}")
            del result[key]
            return found
    return {}


def _as_ours(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    if "scale" in state and "_growth_tracker" in state:
        ours = {"loss_scale": float(state["scale"]), "unskipped": int(state["_growth_tracker"])}
        return {"loss_scaler0": ours | ({"scales": state["scales"]} if "scales" in state else {})}
    if state and all(str(name).startswith("loss_scaler") for name in state):
        return {str(name): dict(value) for name, value in state.items()}
    return {}


def _written(scales: Mapping[str, Mapping[str, Any]], to: str, loss_id: int) -> dict[str, Any]:
    if to == "mpinit":
        return {name: dict(state) for name, state in scales.items()}
    if to == "apex":
        # apex knows no hysteresis.
        return {n: {"loss_scale": s["loss_scale"], "unskipped": s["unskipped"]} for n, s in scales.items()}
    chosen = scales.get(f"loss_scaler{loss_id}")
    if chosen is None:
        raise ValueError(f"there is no loss {loss_id}; the file has {', '.join(scales)}: give --loss-id")
    return {"scale": chosen["loss_scale"], **_GRAD_SCALER, "_growth_tracker": chosen["unskipped"]}


# -- models -----------------------------------------------------------------------------------------------------------


def _is_model_state(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(tensor, torch.Tensor) for tensor in value.values())


def _in_float32(state: Mapping[str, Any], name: str, said: list[str]) -> Mapping[str, Any]:
    lower = [key for key, tensor in state.items() if _is_16_bit(tensor)]
    if not lower:
        return state
    said.append(f"{name}: {len(lower)} tensors were 16-bit, the first {lower[0]!r}; widened to float32")
    return {key: tensor.float() if key in set(lower) else tensor for key, tensor in state.items()}


def _is_16_bit(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_lower_precision(value.dtype)


# -- optimizers -------------------------------------------------------------------------------------------------------


def _is_optimizer_state(value: Any) -> bool:
    return isinstance(value, Mapping) and "state" in value and "param_groups" in value


def _with_steps(state: Mapping[str, Any], name: str, said: list[str]) -> dict[str, Any]:
    """apex's fused optimizers count steps in their groups, torch's for each parameter: say both."""
    per_parameter = {index: dict(values) for index, values in state["state"].items()}
    added = 0
    for group in state["param_groups"]:
        for index in group["params"] if "step" in group else ():
            values = per_parameter.get(index)
            if values and "step" not in values:
                values["step"] = torch.tensor(float(group["step"]))
                added += 1
    if added:
        given_to = counted(added, "parameter")
        said.append(f"{name}: the step in the groups, as apex's fused optimizers have it, given to {given_to}")
    return {**state, "state": per_parameter} if added else dict(state)


def _take_wrapped_optimizers(result: dict[str, Any], said: list[str]) -> dict[str, dict[str, Any]]:
    """apex's FP16_Optimizer: its masters into the model, its inner state in its place, its scale returned."""
    for name, value in result.items():
        if isinstance(value, Mapping) and all(key in value for key in _FP16_OPTIMIZER):
            model = next((key for key, state in result.items() if _is_model_state(state)), None)
            if model is None:
                raise ValueError(
                    f"{name!r} is apex's FP16_Optimizer, whose masters belong into a model, and there is none"
                )
            result[model] = _with_masters(result[model], value["fp32_from_fp16"], name)
            result[name] = value["optimizer_state_dict"]
            said.append(f"{name}: apex's FP16_Optimizer taken apart, its masters written into {model!r}")
            return _scale_of(value["loss_scaler"])
    return {}


def _with_masters(model: Mapping[str, torch.Tensor], groups: Any, name: str) -> dict[str, torch.Tensor]:
    masters: Iterator[torch.Tensor] = (master for group in groups for master in group)
    result = dict(model)
    remaining = list(masters)
    for key, tensor in model.items():
        if _is_16_bit(tensor) and remaining and remaining[0].shape == tensor.shape:
            master = remaining.pop(0).detach()
            if not torch.equal(master.to(tensor.dtype), tensor):
                raise ValueError(f"{name!r}: the master in the place of {key!r} is not the one it was rounded from")
            result[key] = master.float()
    if remaining:
        raise ValueError(
            f"{name!r}: {len(remaining)} masters fit no 16-bit weight in the model's order; load the file with "
            "FP16_Optimizer itself (from apex.fp16_utils, under mpinit run) and save model.state_dict()"
        )
    return result


def _scale_of(scaler: Any) -> dict[str, dict[str, Any]]:
    values = scaler if isinstance(scaler, Mapping) else vars(scaler)
    scale = values.get("cur_scale", values.get("loss_scale"))
    if scale is None:
        return {}
    return {"loss_scaler0": {"loss_scale": float(scale), "unskipped": 0}}
