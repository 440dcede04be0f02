"""What the faces over torch's optimizers share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ....torch_internals.fused_sgd import stepped_wrongly, unfused
from ._steps import ClearsAsTold, loss_of, without_decay


class OverTorch(ClearsAsTold):
    """An optimizer of torch under apex's name and options; it stands before torch's class among the bases."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer or of torch's; the options and step counts that apex's lack are filled in."""
        super().load_state_dict(with_missing_options(state_dict, self.param_groups))


class DecaysApart(OverTorch):
    """One whose weight decay may be decoupled, which torch's own has no option for."""

    @property
    @abstractmethod
    def _decays_apart(self) -> bool:
        """Whether it is."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What the closure returned, or None.
        """
        plain_step = _without_hooks(super().step)
        if not self._decays_apart:
            with unfused(stepped_wrongly((self,), self.param_groups, {})):
                return plain_step(self, closure)
        loss = loss_of(closure)
        with without_decay(self.param_groups) as decays:
            for group, decay in zip(self.param_groups, decays, strict=True):
                params = [p for p in group["params"] if p.grad is not None]
                if decay and params:
                    with torch.no_grad():
                        torch._foreach_mul_(params, 1 - group["lr"] * decay)
            plain_step(self)
        return loss


def _without_hooks(step: Any) -> Callable[..., Any]:
    """A bound step's function without torch's wrapper: the step around it carries the hooks, and they must run once."""
    function = step.__func__
    unhooked: Callable[..., Any] = function.__wrapped__ if getattr(function, "hooked", False) else function
    return unhooked


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
