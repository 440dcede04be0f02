"""What the faces over torch's optimizers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def as_list(params: Iterable[Any]) -> list[Any]:
    """The parameters or groups as a list, so that they can be looked at before an optimizer consumes them."""
    return [params] if isinstance(params, torch.Tensor) else list(params)


def can_fuse(params: list[Any], kind: type[torch.optim.Optimizer]) -> bool:
    """Whether torch has a fused kernel of this optimizer for the devices of all these parameters."""
    devices = {p.device.type for p in _tensors(params)}
    try:
        for device in devices:
            kind([torch.zeros(1, device=device)], lr=0.1, fused=True)  # type: ignore[call-arg]
    except RuntimeError:
        return False
    return all(p.is_floating_point() for p in _tensors(params))


def _tensors(params: list[Any]) -> Iterable[torch.Tensor]:
    for entry in params:
        if isinstance(entry, torch.Tensor):
            yield entry
        elif isinstance(entry, dict):
            inside = entry["params"]
            yield from [inside] if isinstance(inside, torch.Tensor) else (_bare(p) for p in inside)
        else:
            yield _bare(entry)


def _bare(entry: Any) -> torch.Tensor:
    tensor: torch.Tensor = entry[1] if isinstance(entry, tuple) else entry
    return tensor


def keep_group_params_readable(params: list[Any]) -> list[Any]:
    """Turn groups whose parameters are generators into groups with lists, in copies of the groups."""
    return [{**entry, "params": as_list(entry["params"])} if isinstance(entry, dict) else entry for entry in params]


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """``kind.step`` without torch's wrapper: a subclass' own step carries the hooks already, and they must run once."""
    step: Callable[..., Any] = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


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
    for group, present in zip(saved["param_groups"], groups, strict=False):
        own = {name: value for name, value in present.items() if name != "params"}
        filled.append({**own, **group})
        if "step" in group:
            steps = filled[-1].pop("step")
            for key in group["params"]:
                if key in state:
                    state[key].setdefault("step", torch.tensor(float(steps)))
    filled.extend(saved["param_groups"][len(filled) :])
    return {**saved, "state": state, "param_groups": filled}
