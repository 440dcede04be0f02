"""Optimizers that update each parameter by itself, so that they can be stepped a few parameters at a time.

Torch's own are in a list. Any other declares it by ``optimizer.steps_per_parameter = True``, or is stepped in one part.
"""

import inspect
import os
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import torch
from torch.optim import Optimizer

_PER_PARAMETER: Final = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)
# States of these that are not encoded: copies of weights, whose low bits count like a master's; sparse gradients'.
_KEPT: Final = {"ASGD": frozenset({"ax"}), "SparseAdam": frozenset({"exp_avg", "exp_avg_sq"})}
# Methods that a subclass may override: none changes the step, which is compared by itself.
_BESIDE_STEPS: Final = ("step", "add_param_group", "load_state_dict", "state_dict", "zero_grad")
# The attribute by which a subclass of an optimizer of torch declares that it overrides more than these, and that each
# parameter is still updated by itself. It says nothing of classes derived from it.
_OVERRIDES: Final = "overrides_update_each_parameter"
# Folders of functions that may be a step or wrap one: torch (optimizers, schedulers, dynamo) and this folder.
_TRUSTED: Final = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, Path(__file__).parent))


def steps_per_parameter(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to update each parameter by itself, with every option."""
    if getattr(optimizer, "steps_per_parameter", False):
        return True
    return _known(optimizer, but_for_overrides=True) is not None and _steps_as_its_class(optimizer)


def is_known(optimizer: Optimizer) -> bool:
    """Return whether an optimizer steps as one of torch's classes."""
    return _known(optimizer) is not None


def kept_states(optimizer: Optimizer) -> frozenset[str]:
    """Return the names of an optimizer's states that are never encoded."""
    return _KEPT.get(_known(optimizer) or "", frozenset())


def _steps_as_its_class(optimizer: Optimizer) -> bool:
    """Return whether ``step`` was replaced neither on the object nor on its class.

    A replacement may compute over several parameters.
    """
    return _is_trusted(optimizer.step) and _is_trusted(type(optimizer).step)


def _is_trusted(function: Any) -> bool:
    """Return whether a function, and each that it wraps, is torch's or mpinit's."""
    while function is not None:
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_TRUSTED):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _known(optimizer: Optimizer, but_for_overrides: bool = False) -> str | None:
    """Return the name in torch.optim of the class whose step this optimizer has, if it is in the list.

    Args:
        optimizer: the optimizer.
        but_for_overrides: whether its update may differ by overrides that update each parameter by itself.
    """
    step = inspect.unwrap(type(optimizer).step)
    for name in _PER_PARAMETER:
        cls = getattr(torch.optim, name, None)
        # torch wraps the step of a class when its first object is made.
        if cls is not None and isinstance(optimizer, cls) and step is inspect.unwrap(cls.step):
            return name if _steps_like(cls, type(optimizer), but_for_overrides) else None
    return None


def _steps_like(cls: type[Optimizer], own: type[Optimizer], but_for_overrides: bool) -> bool:
    """Return whether a subclass overrides no method that the step of torch's class may call."""
    derived = takewhile(lambda other: other is not cls, own.__mro__)
    others = [vars(other) for other in derived if not other.__module__.startswith("torch.optim.")]
    if but_for_overrides:
        others = [members for members in others if not members.get(_OVERRIDES, False)]
    names = {name for members in others for name, value in members.items() if callable(value)}
    return not any(hasattr(cls, name) for name in names if name not in _BESIDE_STEPS and not name.startswith("__"))


class StepNumbers:
    """A copy of the numbers that an optimizer keeps for itself or for a group, such as ``group["step"]``.

    They are restored before every part of a step but the first. So every part reads the numbers that the first one
    read, and at the end they have changed by one step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._before = [
            (owner, {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in owner.items() if _is_number(v)})
            for owner in (vars(optimizer), *optimizer.param_groups)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the numbers, and delete those that came later."""
        for owner, numbers in self._before:
            for key in [key for key, value in owner.items() if _is_number(value) and key not in numbers]:
                del owner[key]
            for key, value in numbers.items():
                if isinstance(value, torch.Tensor):
                    owner[key].copy_(value)
                else:
                    owner[key] = value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)
