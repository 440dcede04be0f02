"""All that the faces take from the inside of mpinit: sessions, masters, loss scalers. The rest is names of users."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from .. import registry
from ..distributed import replicas
from ..scaling.scaler import LossScaler

# mpinit's own limit where none is given: below it a scale's reciprocal is no float32.
LOWEST_SCALE: Final = torch.finfo(torch.float32).tiny


# The live session of a model or an optimizer, or None, and all of them, oldest first. The faces read their ``models``,
# ``optimizers``, ``scalers``, ``properties``, ``opt_level``, ``verbosity``, ``describe()``, ``losses.scaler(loss_id)``.
session_of = registry.of
live_sessions = registry.live
Scaler = LossScaler
reduce_in_float32 = replicas.reduce_in_float32


def share_scalers(session: Any, others: Sequence[Any]) -> None:
    """Let other sessions scale by the scalers of this one."""
    for other in others:
        other.scalers[:] = session.scalers
        _patch_steps(other)


def share_overflow(optimizers: Sequence[Optimizer]) -> None:
    """Let an overflow that was found in the gradients of one optimizer count for all of them."""
    managed = [registry.session_of(optimizer).managed.find(optimizer).gradients for optimizer in optimizers]
    known = [(each, each.state.found_inf) for each in managed if each.state.found_inf is not None]
    if known:
        device = known[0][1].device
        highest = torch.stack([found_inf.to(device) for _, found_inf in known]).max()
        for gradients, found_inf in known:
            gradients.share(highest.to(found_inf.device))


def change_rule(scaler: Scaler, **numbers: Any) -> None:
    """Replace numbers of a scaler's rule: ``init_scale``, ``growth_interval``, ``min_scale``, ``max_scale``."""
    scaler.rule = dataclasses.replace(scaler.rule, **numbers)
    for session in live_sessions():
        if scaler in session.scalers:
            _patch_steps(session)


def _patch_steps(session: Any) -> None:
    """Patch steps where losses may be scaled from here on, at a level that does not scale them."""
    session.patch_steps()
