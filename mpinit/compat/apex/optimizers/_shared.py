"""What the fused optimizers share: apex's options, and checkpoints of apex and torch."""

from collections.abc import Iterable
from typing import Any

import torch


class ApexOptimizer(torch.optim.Optimizer):
    """The base of all: apex's options, which are attributes."""

    set_grad_none: bool

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's state for copies and pickles, and the options, which torch leaves out."""
        options = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return {**options, **super().__getstate__()}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients. The default of ``set_to_none`` is the constructor's ``set_grad_none``."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class OverTorch(ApexOptimizer):
    """A mixin for an optimizer of torch, whose class is the next base."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of apex's or torch's optimizer; fill in options and step counts that apex's state lacks."""
        # apex counts steps per group, torch's optimizers count them per parameter.
        state = {key: dict(value) for key, value in state_dict["state"].items()}
        filled = []
        for index, group in enumerate(state_dict["param_groups"]):
            present = self.param_groups[index] if index < len(self.param_groups) else {}
            filled.append({name: value for name, value in present.items() if name != "params"} | group)
            steps = filled[-1].pop("step", None)
            for key in group["params"] if "step" in group else ():
                if key in state:
                    state[key].setdefault("step", torch.tensor(float(steps), dtype=torch.float32, device="cpu"))
        super().load_state_dict({**state_dict, "state": state, "param_groups": filled})


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Turn parameters or groups into groups with lists, so that reading them consumes no generator."""
    entries: list[Any] = list(params)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    tensors = ((group, group["params"]) for group in groups)
    return [{**group, "params": [own] if isinstance(own, torch.Tensor) else list(own)} for group, own in tensors]


def are_on(groups: list[dict[str, Any]], *devices: str) -> bool:
    """Return whether all parameters are floating tensors on these types of devices."""
    entries = (entry for group in groups for entry in group["params"])
    params = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    return all(p.device.type in devices and p.is_floating_point() for p in params)
