"""The page ``reference/gradient-states.md``: every phase of gradients and every event, from the table in the code."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch

from mpinit.optimizer.gradient_state import ERRORS, TABLE, GradientState, Phase
from mpinit.plan import ScalingRule
from mpinit.scaling.scaler import LossScaler

_RULE: Final = ScalingRule(True, 65536.0, 2.0, 0.5, 2000, 1, 2.0**-126, 2.0**24, 64)
_SCALER: Final = LossScaler(_RULE)
_OTHER_SCALER: Final = LossScaler(_RULE)


class _Block:
    """An open block."""


_BLOCK: Final = _Block()
_GRADIENT: Final = torch.zeros(1)
_MARKS: Final = (weakref.ref(_GRADIENT),)

# The rows: gradients that are scaled are so in a block or by a GradScaler.
STATES: Final[Mapping[str, GradientState]] = {
    "EMPTY": GradientState(),
    "SCALED, in a block": GradientState(Phase.SCALED, _SCALER, block=weakref.ref(_BLOCK)),
    "SCALED, by a GradScaler": GradientState(Phase.SCALED, _SCALER),
    "SCALED, by another GradScaler": GradientState(Phase.SCALED, _OTHER_SCALER),
    "UNSCALED": GradientState(Phase.UNSCALED, _SCALER, torch.ones(()), checked=_MARKS),
    "USED": GradientState(Phase.USED, _SCALER, checked=_MARKS),
    "SKIPPED": GradientState(Phase.SKIPPED, _SCALER, torch.ones(()), checked=_MARKS),
}
_ARGUMENTS: Final[Mapping[str, Any]] = {
    "scaler": _SCALER,
    "block": _BLOCK,
    "found_inf": torch.zeros(()),
    "hidden": None,
    "checked": (),
    "versions": (),
    "used": _MARKS,
    "has_gradients": True,
    "in_kernel": False,
    "what": "a step",
    "instead": "move it after the with-block",
}

_INTRODUCTION: Final = """\
# The states of gradients

mpinit keeps one value for the gradients of an optimizer: their phase, the loss scaler, what the last check found, and
whether ranks have agreed on it. Every event replaces it by another value, as this page shows: it is made from the table
in `mpinit/optimizer/gradient_state.py`, which is all that decides whether gradients may be stepped.
"""

_RULES: Final = """\
## Which gradients a check belongs to

An overflow belongs to the tensors that were checked. At a step:

- Gradients that are gone (`zero_grad()`), or all 0 (`zero_grad(set_to_none=False)`), have no overflow.
- Where **none** of the checked tensors is a gradient any more, as after `zero_grad()` and a plain `backward()`, those
  that are there are new. They are checked instead, and the step is done where they are finite. This needs no device
  sync: it is known from the tensors' identity.
- Where a step was **skipped** for them, they are checked again at the next one: gradients that are finite by then are
  used, whoever changed them.
- Where some of the checked tensors are still gradients, and no step was skipped for them, the overflow stays, also
  where all numbers are finite: clipping makes finite numbers of inf. So after an overflow,
  `zero_grad(set_to_none=False)` and a plain `backward()` with no step between, one step is skipped that need not be.
  DistributedDataParallel with `gradient_as_bucket_view=True` may keep the same tensors, too.
- Gradients that are replaced (`parameter.grad = ...`) are new ones: finite, they are used.
- If gradients were **finite**, later writes to them (by clipping, a penalty, a hook, or by hand) are checked before the
  step. On a CPU all gradients are read. On a device those whose version counter has changed are checked, without a
  device sync. Writes of step pre-hooks are checked too, except with several ranks, which have agreed by then.

A block that was dropped without an exit is ended before the next event.
"""


def cell(state: GradientState, event: str) -> str:
    """Return the phase after an event, or the name of the error."""
    function = TABLE[event]
    names = list(inspect.signature(function).parameters)[1:]
    try:
        return function(state, **{name: _ARGUMENTS[name] for name in names}).phase.name
    except RuntimeError as error:
        return f"error: {named(str(error))}"


def named(message: str) -> str:
    """Return the name of an error with a message."""
    for name, template in ERRORS.items():
        if all(part in message for part in template.split("{}")):
            return name
    raise KeyError(message)


def page() -> str:
    """Return the page."""
    parts = [_INTRODUCTION, "| phase | meaning |\n|---|---|"]
    parts[-1] += "".join(f"\n| {phase.name} | {phase.value} |" for phase in Phase) + "\n"
    parts.append("## The table\n\nA row an event, a column a phase: the phase after it, or the error.\n")
    rows = [f"| event | {' | '.join(STATES)} |", f"|---{'|---' * len(STATES)}|"]
    rows += [f"| {event} | {' | '.join(cell(state, event) for state in STATES.values())} |" for event in TABLE]
    parts.append("\n".join(rows) + "\n")
    parts.append("## The errors\n\n| error | message |\n|---|---|")
    parts[-1] += "".join(f"\n| {name} | {text.replace('{}', '...')} |" for name, text in ERRORS.items()) + "\n"
    parts.append(_RULES)
    return "\n".join(parts)
