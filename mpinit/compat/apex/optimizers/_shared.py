"""Functions that the fused optimizers share."""

from collections.abc import Iterable
from typing import Any, Final

import torch

# Attributes of apex's optimizers, which torch's __getstate__ omits from copies and pickles.
_OPTIONS: Final[tuple[str, ...]] = ("set_grad_none", "adam_w_mode", "materialize_master_grads")


class OverTorch(torch.optim.Optimizer):
    """A mixin with apex's options for an optimizer of torch, whose class is the next base."""

    set_grad_none: bool

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's state and apex's options, for copies and pickles."""
        options: dict[str, Any] = {name: vars(self)[name] for name in _OPTIONS if name in vars(self)}
        return {**super().__getstate__(), **options}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients. The default of ``set_to_none`` is the constructor's ``set_grad_none``."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

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
    entries: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    tensors = ((group, group["params"]) for group in groups)
    return [{**group, "params": [own] if isinstance(own, torch.Tensor) else list(own)} for group, own in tensors]


def can_fuse(groups: list[dict[str, Any]], kind: type[torch.optim.Optimizer], but_not_on: str = "") -> bool:
    """Return whether torch has a fused kernel of this optimizer for the device of every parameter."""
    entries = (entry for group in groups for entry in group["params"])
    params = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    devices = {p.device.type for p in params}
    try:
        for device in devices:
            kind([torch.zeros(1, dtype=torch.float32, device=device)], lr=0.1, fused=True)  # type: ignore[call-arg]
    except RuntimeError:
        return False
    return but_not_on not in devices and all(p.is_floating_point() for p in params)
