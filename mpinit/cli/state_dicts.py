"""The state dicts of models and optimizers in a checkpoint, at any depth: weights in float32, and step counts.

A checkpoint may nest them: ``{"models": {"G": ..., "D": ...}, "optimizers": [..., ...]}``.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from ..basics.dtypes import is_lower_precision
from ..basics.tables import counted

# A checkpoint that contains itself ends here.
_DEEPEST: Final = 8


class StateDicts:
    """The conversion of the state dicts in one checkpoint.

    Attributes:
        are_found: whether there was a state dict.
        changes: a line for each change.
    """

    def __init__(self, changes: list[str]) -> None:
        self.are_found = False
        self.changes = changes
        # The address and the dtype of 16-bit memory -> all its numbers in float32: tensors that share memory (tied
        # weights) share it afterwards.
        self._wide: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def convert(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checkpoint with float32 weights, and with step counts where torch's optimizers have them."""
        return dict(self._converted(checkpoint, "", _DEEPEST))

    def _converted(self, value: Any, place: str, depth: int) -> Any:
        is_mapping = isinstance(value, Mapping)
        if not (is_mapping or isinstance(value, (list, tuple))) or not depth:
            return value
        if is_mapping and "fp32_from_fp16" in value:
            raise ValueError(
                f"{place!r} is apex's FP16_Optimizer, whose masters are the model's weights: copy the tensors of its "
                "['fp32_from_fp16'], group by group, into the parameters of a float32 model, and save "
                "model.state_dict() and its ['optimizer_state_dict']"
            )
        if is_optimizer(value):
            self.are_found = True
            return self._with_steps(value, place)
        entries = dict(value.items() if is_mapping else enumerate(value))
        tensors = {key: entry for key, entry in entries.items() if isinstance(entry, torch.Tensor)}
        # Tensors of the checkpoint itself may be anything.
        self.are_found |= bool(tensors and place)
        lower = {key: tensor for key, tensor in tensors.items() if is_lower_precision(tensor.dtype)}
        if lower:
            named = f"{counted(len(lower), 'tensor was', 'tensors were')} 16-bit, the first {next(iter(lower))!r}"
            self.changes.append(f"{place or 'the file'}: {named}; widened to float32")
        changed = {key: self._in_float32(tensor) for key, tensor in lower.items()}
        for key, entry in entries.items():
            converted = self._converted(entry, f"{place}[{key!r}]" if place else str(key), depth - 1)
            if converted is not entry:
                changed[key] = converted
        return _replaced(value, changed) if changed else value

    def _in_float32(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        if type(tensor) not in (torch.Tensor, nn.Parameter) or not address:
            return tensor.detach().float()
        key = address, tensor.dtype
        if key not in self._wide:
            count = tensor.untyped_storage().nbytes() // tensor.itemsize
            self._wide[key] = tensor.detach().as_strided((count,), (1,), 0).float()
        wide = self._wide[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return nn.Parameter(wide, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wide

    def _with_steps(self, state: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        """Copy the step counts of apex's fused optimizers, which are in the groups, to each parameter's state."""
        groups, per_parameter = state["param_groups"], dict(state["state"])
        steps = {index: group["step"] for group in groups if "step" in group for index in group["params"]}
        lacking = [index for index in steps if per_parameter.get(index) and "step" not in per_parameter[index]]
        if not lacking:
            return state
        for index in lacking:
            count = torch.tensor(float(steps[index]), dtype=torch.float32, device="cpu")
            per_parameter[index] = {**per_parameter[index], "step": count}
        receivers = counted(len(lacking), "parameter")
        line = f"{place}: the step in the groups, as apex's fused optimizers have it, copied to {receivers}"
        self.changes.append(line)
        return {**state, "state": per_parameter}


def is_optimizer(value: Any) -> bool:
    """Return whether a value is the state dict of an optimizer."""
    return isinstance(value, Mapping) and "state" in value and "param_groups" in value


def _replaced(container: Any, entries: Mapping[Any, Any]) -> Any:
    """Return a copy of a container with other entries; a state dict keeps its ``_metadata``."""
    if isinstance(container, tuple):
        items = [entries.get(index, item) for index, item in enumerate(container)]
        make: Any = getattr(type(container), "_make", tuple)
        return make(items)
    if isinstance(container, Mapping) and not isinstance(container, dict):
        return {**container, **entries}
    copied = copy.copy(container)
    for key, entry in entries.items():
        copied[key] = entry
    return copied
