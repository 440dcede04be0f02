"""The internals of mpinit that ``compat/`` uses: sessions and loss scalers. All else it uses is public."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import amp, initialization, registry
from ..autocast.installation import REGISTERED
from ..config import reading
from ..optimizer.gradients import any_of
from ..scaling.scaler import LossScaler

# session_of returns the live session of a model or an optimizer, or None; live_sessions lists all, oldest first.
start = initialization.start
resolve = reading.resolve
session_of = registry.of
live_sessions = registry.live
Scaler = LossScaler


@contextmanager
def in_all(blocks: Sequence[Any], optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
    """Enter several ``scale_loss`` blocks as one; an overflow found in it skips the steps of all the optimizers.

    mpinit skips the steps of those optimizers whose own gradients overflowed. An overflow of another loss, from before
    these blocks, is not passed on. No device sync is needed.
    """
    with ExitStack() as entered:
        # Every block yields the loss times the same scale, and the user calls backward() on one of these.
        scaled: list[torch.Tensor] = [entered.enter_context(block) for block in blocks]
        for block in blocks[1:]:
            block.skip_use_check()
        parts = [registry.session_of(optimizer).managed.find(optimizer).gradients for optimizer in optimizers]
        before = [gradients.found_inf for gradients in parts]
        yield scaled[0]
    pairs = [(gradients.found_inf, old) for gradients, old in zip(parts, before, strict=True)]
    found = any_of(*(new if new is None or old is None else new * (old == 0) for new, old in pairs))
    for gradients in parts if found is not None else ():
        gradients.found_inf = any_of(gradients.found_inf, found)


def undo_all(sessions: Iterable[Any]) -> None:
    """Undo sessions, also those whose models and optimizers the script has dropped."""
    for session in sessions:
        session.undo()


@contextmanager
def casts_of_functions(properties: dict[str, Any], allow_banned: bool) -> Iterator[None]:
    """Cast functions in the block by apex's policy, without a model.

    With ``allow_banned``, ``binary_cross_entropy``, which is refused in 16 bits, runs in float32.
    """
    nothing, before = nn.Module(), list(REGISTERED)
    if allow_banned:
        amp.register_float_function(nn.functional, "binary_cross_entropy")
    added = [entry for entry in REGISTERED if entry not in before]
    try:
        start(nothing, None, "O1", properties, cast_policy="apex")
        try:
            yield
        finally:
            amp.undo(nothing)
    finally:
        REGISTERED[:] = [entry for entry in REGISTERED if entry not in added]
