"""The internals of mpinit that ``compat/`` uses: sessions and loss scalers. All else it uses is public."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from .. import amp, initialization, registry
from ..autocast.installation import REGISTERED
from ..config.loss_scale import DynamicLossScale
from ..scaling.scaler import LossScaler

# session_of returns the live session of a model or an optimizer, or None; live_sessions lists all, oldest first.
start = initialization.start
session_of = registry.of
live_sessions = registry.live
Scaler = LossScaler


def share_scalers(session: Any, others: Sequence[Any]) -> None:
    """Make other sessions use the loss scalers of this one."""
    for other in others:
        other.scalers[:] = session.scalers


def overflows(optimizers: Sequence[Optimizer]) -> list[tuple[Any, torch.Tensor | None]]:
    """Return the gradients of each optimizer, and whether they have an overflow already; None is: not checked yet."""
    checked = [registry.session_of(optimizer).managed.find(optimizer).gradients for optimizer in optimizers]
    return [(gradients, gradients.found_inf) for gradients in checked]


def share_overflow(before: Sequence[tuple[Any, torch.Tensor | None]]) -> None:
    """Skip the steps of all optimizers if one of them has an overflow that :func:`overflows` did not have before."""
    found = [
        gradients.found_inf if earlier is None else gradients.found_inf * (earlier == 0)
        for gradients, earlier in before
        if gradients.found_inf is not None
    ]
    for gradients, _ in before if found else ():
        own = [] if gradients.found_inf is None else [gradients.found_inf]
        gradients.found_inf = torch.stack([each.to(found[0].device) for each in (*own, *found)]).amax()
        gradients.is_fresh = True


def end_casts(session: Any) -> None:
    """End a session's casts of functions. Its optimizers go on: losses are scaled as before, by the same scalers."""
    models, optimizers, scalers = list(session.models), list(session.optimizers), list(session.scalers)
    properties = dict(session.properties) | {"patch_torch_functions": False, "verbosity": 0}
    if models or optimizers:
        initialization.undo((*models, *optimizers)[0])
    else:  # the script has dropped them all
        session.undo()
    if models and optimizers:
        start(models, optimizers, session.opt_level, properties)
        registry.session_of(optimizers[0]).scalers[:] = scalers


def has_overflow(scaler: Scaler) -> bool:
    """Return whether a check since the last update of the scale found inf or nan; this needs a device sync."""
    return scaler.found_inf is not None and bool(scaler.found_inf.item() > 0)


def set_rule(scaler: Scaler, rule: float | DynamicLossScale) -> None:
    """Replace a scaler's rule."""
    scaler.rule = rule


def master_values(optimizer: Optimizer) -> dict[Any, torch.Tensor]:
    """Return the float32 values of an initialised optimizer's 16-bit weights; empty for any other optimizer."""
    session = session_of(optimizer)
    if session is None:
        return {}
    weights = [
        p for group in optimizer.param_groups for p in group["params"] if p.dtype in (torch.float16, torch.bfloat16)
    ]
    return {weight: session.view.values_of(weight) for weight in weights}


@contextmanager
def banned_in_float32() -> Iterator[None]:
    """Run ``binary_cross_entropy``, which O1 refuses in 16 bits, in float32 for sessions that begin in the block."""
    before = list(REGISTERED)
    amp.register_float_function(torch.nn.functional, "binary_cross_entropy")
    added = [entry for entry in REGISTERED if entry not in before]
    try:
        yield
    finally:
        REGISTERED[:] = [entry for entry in REGISTERED if entry not in added]
