"""Optimizers that update each parameter by itself, so that they can be stepped a few parameters at a time.

Torch's own are in a list. Any other declares it by ``optimizer.steps_per_parameter = True``, or is stepped in one part.
"""

from typing import Any, Final

import torch
from torch.optim import Optimizer

from .hooks import inside_hooks

# Not ASGD, whose averages are copies of weights that need all bits, and not those with other kinds of gradients.
_TORCHS: Final = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
_KNOWN: Final = frozenset(getattr(torch.optim, name) for name in _TORCHS)


def is_known(optimizer: Optimizer) -> bool:
    """Return whether an optimizer that is not patched yet is one of torch's, and steps as its class does.

    Such a step reads parameters in the groups alone, and changes no gradient.
    """
    return type(optimizer) in _KNOWN and inside_hooks(optimizer.step) is not None


def steps_per_parameter(optimizer: Optimizer) -> bool:
    """Return whether an optimizer that is not patched yet is known to update each parameter by itself.

    A class declares it for itself, and not for classes derived from it.
    """
    declared = {**vars(type(optimizer)), **vars(optimizer)}.get("steps_per_parameter", False)
    return bool(declared) or is_known(optimizer)


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
