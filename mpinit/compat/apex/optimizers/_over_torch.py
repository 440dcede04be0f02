"""What the faces over torch's optimizers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._steps import ClearsAsTold


class OverTorch(ClearsAsTold):
    """An optimizer of torch under apex's name and options; it stands before torch's class among the bases."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer or of torch's; the options and step counts that apex's lack are filled in."""
        super().load_state_dict(with_missing_options(state_dict, self.param_groups))


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameters or groups as groups with lists, which can be looked at before an optimizer consumes them."""
    entries: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    held = ((group, group["params"]) for group in groups)
    return [{**group, "params": [own] if isinstance(own, torch.Tensor) else list(own)} for group, own in held]


def can_fuse(groups: list[dict[str, Any]], kind: type[torch.optim.Optimizer], but_not_on: str = "") -> bool:
    """Whether torch has a fused kernel of this optimizer for the devices of all these parameters."""
    entries = (entry for group in groups for entry in group["params"])
    params = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    devices = {p.device.type for p in params}
    try:
        for device in devices:
            kind([torch.zeros(1, device=device)], lr=0.1, fused=True)  # type: ignore[call-arg]
    except RuntimeError:
        return False
    return but_not_on not in devices and all(p.is_floating_point() for p in params)


def with_missing_options(saved: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A saved optimizer state with the options that apex's optimizers did not have, and a step per parameter.

    apex counts steps once a group; torch's optimizers count them for each parameter.

    Args:
        saved: what ``state_dict()`` returned, in apex's form or in torch's.
        groups: the optimizer's present groups, whose options fill the gaps.

    Returns:
        A new dict in torch's form; ``saved`` is left as it is.
    """
    state = {key: dict(value) for key, value in saved["state"].items()}
    filled = []
    for index, group in enumerate(saved["param_groups"]):
        present = groups[index] if index < len(groups) else {}
        filled.append({name: value for name, value in present.items() if name != "params"} | group)
        if "step" in group:
            steps = filled[-1].pop("step")
            for key in group["params"]:
                if key in state:
                    state[key].setdefault("step", torch.tensor(float(steps)))
    return {**saved, "state": state, "param_groups": filled}
