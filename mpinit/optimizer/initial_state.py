"""The state with which an optimizer starts, which checkpoints need before its first step."""

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.patching import UndoStack
from ..distributed.sharding import local
from ..masters.masters import Master, Masters
from .hooks import inside_hooks
from .members import with_wrapped
from .step import ManagedOptimizer

# Attributes of an optimizer that are read and restored separately, or that the step is meant to change.
_SEPARATE: Final = frozenset({"param_groups", "state"})


@contextlib.contextmanager
def with_initial_state(optimizer: Optimizer, managed: ManagedOptimizer | None) -> Iterator[bool]:
    """Create the initial state of an optimizer that has none, by a step without effect; yield whether it was created.

    torch would create the state with gradients of the weights' dtype, which 16-bit weights with float32 gradients
    refuse. It creates none if there are gradients, so there are some inside the block. After an exception in the block
    the optimizer has no state, as before.

    Weights, groups and attributes of the optimizer are restored after the step, which runs no hooks of the user's: some
    optimizers divide by the norm of the gradients, or count steps in their groups.

    Args:
        optimizer: the optimizer.
        managed: its managed optimizer; None if it is not initialised.
    """
    if optimizer.state:
        yield False
        return
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    gradients = [weight.grad for weight in weights]
    try:
        with torch.inference_mode(False):  # a step reads version counters, which inference tensors do not have
            for weight in weights:
                dtype = weight.grad_dtype or weight.dtype
                weight.grad = torch.zeros_like(weight, dtype=dtype) if weight.requires_grad else None
            _step_without_effect(optimizer, managed, weights)
        for entries in optimizer.state.values():
            if isinstance(entries, dict) and "step" in entries:
                step = entries["step"]
                entries["step"] = torch.zeros_like(step) if isinstance(step, torch.Tensor) else 0
        yield True
    except BaseException:
        optimizer.state.clear()
        raise
    finally:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient


def _step_without_effect(
    optimizer: Optimizer, managed: ManagedOptimizer | None, weights: Sequence[nn.Parameter]
) -> None:
    masters = None if managed is None else managed.shared.masters
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    # LBFGS needs a loss. With gradients of 0 it is where it wants to be.
    needs_closure = parameter is not None and parameter.default is parameter.empty
    closure: list[Any] = (
        [lambda: torch.zeros((), dtype=torch.float32, device=weights[0].device)] if needs_closure else []
    )
    undos = UndoStack()
    try:
        undos.push(_Numbers(weights, masters).restore)
        for each in with_wrapped([optimizer]):
            undos.push(_Attributes(each).restore)
            for group in each.param_groups:
                undos.push(_Group(group).restore)
        if managed is not None and managed.is_patched:
            # Not through its step, which counts steps, unless all learning rates are 0.
            managed.check_outside("mpinit.TrainState")
            managed.run_own(*closure)
        else:
            step = inside_hooks(optimizer.step)
            (optimizer.step if step is None else partial(step, optimizer))(*closure)
    finally:
        undos.unwind()


class _Group:
    """The entries of a group. Until they are restored the group has copies, and a learning rate of 0.

    Weight decay is added to the gradients, and would change the optimizer's moments, so it is 0 too.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._entries = {key: value for key, value in group.items() if key != "params"}
        for key, value in self._entries.items():
            group[key] = _copy(value)
        for key in ("lr", "weight_decay"):
            if key in group:
                is_tensor = isinstance(group[key], torch.Tensor)
                group[key] = torch.tensor(0.0, dtype=torch.float32, device="cpu") if is_tensor else 0.0

    def restore(self) -> None:
        for key in [key for key in self._group if key != "params" and key not in self._entries]:
            del self._group[key]
        self._group.update(self._entries)


class _Attributes:
    """The attributes of an optimizer, such as its own counts of steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._own = vars(optimizer)
        self._values = {name: value for name, value in self._own.items() if name not in _SEPARATE}

    def restore(self) -> None:
        for name in [name for name in self._own if name not in _SEPARATE and name not in self._values]:
            del self._own[name]
        self._own.update(self._values)


class _Numbers:
    """The numbers of weights, with their masters' values."""

    def __init__(self, weights: Sequence[nn.Parameter], masters: Masters | None) -> None:
        self._masters = masters
        self._saved: list[tuple[nn.Parameter, Master | None, torch.Tensor]] = []
        for weight in {id(weight): weight for weight in weights}.values():
            master = None if masters is None else masters.of(weight)
            if not weight.is_meta:
                self._saved.append((weight, master, self._numbers_of(weight, master).clone()))

    def _numbers_of(self, weight: nn.Parameter, master: Master | None) -> torch.Tensor:
        if master is None or self._masters is None:
            return weight.detach()
        return self._masters.values(master)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the numbers of weights that have changed; the others are not written to."""
        for weight, master, before in self._saved:
            if torch.equal(local(self._numbers_of(weight, master)), local(before)):
                continue
            if master is None or self._masters is None:
                weight.copy_(before)
            else:
                self._masters.load(master, before)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, (dict, list, set)) else value
