"""What is said about a session: a log line when it starts, and a few lines of text when it is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch.optim import Optimizer

from ..basics.dtypes import dtype_name
from ..basics.logs import log
from ..basics.tables import counted
from ..plan import Masters
from ..session import Session

_TOLD: Final = (
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)
# Told where they are not what they are by default.
_TOLD_IF_CHOSEN: Final = ("optimizer_state", "gradient_release")


def announce(session: Session, came_in_16_bit: Sequence[str]) -> None:
    """Log in one line what was set up, and in another which weights came in 16-bit already."""
    if session.verbosity < 1:
        return
    words = ", ".join(f"{name}={getattr(session.properties, name)}" for name in _told(session))
    log.info("%s: %s", session.describe(), words)
    if came_in_16_bit:
        first = ", ".join(came_in_16_bit[:3])
        log.info("%s: %s came in 16-bit, first %s", session.describe(), counted(len(came_in_16_bit), "weight"), first)


def describe(session: Session) -> str:
    """What the session does and how it fares, on a few lines of text. Reads the scales and counters off the device."""
    lines = [session.describe()]
    lines += [f"  {name} = {getattr(session.properties, name)}" for name in _told(session)]
    for index, model in enumerate(session.models):
        lines.append(f"model {index}, {type(model).__name__}: {_counts(model.parameters())} parameters")
        below = set(model.modules())
        kept = [name for module, name in session.selection.kept.items() if module in below]
        if kept:
            first = ", ".join(name or "the whole model" for name in kept[:5])
            lines.append(f"  float32: {first}" + (f" and {len(kept) - 5} more" if len(kept) > 5 else ""))
    for index, optimizer in enumerate(session.optimizers):
        counts = session.managed(optimizer).counts
        masters = _masters_of(session, optimizer)
        lines.append(
            f"optimizer {index}, {type(optimizer).__name__}: {masters}; {counted(counts.good, 'step')} done, "
            f"{counts.skipped} skipped, {counts.consecutive} of them in a row just now"
        )
    waiting = session.waiting_weights()
    if waiting:
        lines.append(
            f"{counted(len(waiting), 'weight')} ({_counts(waiting)} parameters) "
            f"wait{'s' if len(waiting) == 1 else ''} for an optimizer: mpinit.add_optimizers"
        )
    lines += [
        f"loss {index}: scale {scaler.loss_scale():g}, "
        f"{counted(scaler.unskipped, 'good backward pass', 'good backward passes')} since it moved"
        for index, scaler in enumerate(session.scalers)
    ]
    return "\n".join(lines)


def _masters_of(session: Session, optimizer: Optimizer) -> str:
    if session.plan.masters is Masters.IN_MODEL:
        return "steps the model's own float32 parameters, which are 16-bit inside forwards"
    masters = len(session.managed(optimizer).members.masters)
    return counted(masters, "float32 master") if masters else "no masters"


def _told(session: Session) -> list[str]:
    fields = type(session.properties).model_fields
    chosen = [name for name in _TOLD_IF_CHOSEN if getattr(session.properties, name) != fields[name].default]
    return [*_TOLD, *chosen]


def _counts(parameters: Iterable[torch.Tensor]) -> str:
    elements: dict[str, int] = {}
    for parameter in parameters:
        name = dtype_name(parameter.dtype)
        elements[name] = elements.get(name, 0) + parameter.numel()
    return ", ".join(f"{count:,} {name}" for name, count in elements.items()) or "no"
