"""Finding mpinit's session from the objects that scripts hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....basics.logs import log
from ... import _core
from ..parallel.LARC import LARC


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that amp knows: inside a LARC that was put around it after ``initialize``."""
    while isinstance(optimizer, LARC) and _core.session_of(optimizer) is None:
        optimizer = optimizer.optim
    return optimizer


def training_session() -> Any:
    """The latest session that has optimizers, or else the latest: a teacher's has no loss of its own.

    Raises:
        AttributeError: there is none, as there is no such attribute of apex's state before ``initialize``.
    """
    live = _core.live_sessions()
    training = [session for session in live if session.optimizers] or live
    if not training:
        raise AttributeError("amp has no loss scalers before amp.initialize(...)")
    return training[-1]


def share_scalers(optimizers: Sequence[Any]) -> None:
    """Give the loss scalers of these optimizers' session to every earlier one: apex knows one list, the latest.

    Args:
        optimizers: what ``initialize`` was just given; without any, as a teacher has none, nothing happens.
    """
    session = _core.session_of(optimizers[0]) if optimizers else None
    if session is None:
        return
    others = [
        earlier
        for earlier in _core.live_sessions()
        if earlier is not session and any(hasattr(optimizer, "_amp_stash") for optimizer in earlier.optimizers)
    ]
    _core.share_scalers(session, others)
    if others and session.verbosity > 0:
        kind = "dynamic" if session.scalers[0].rule.dynamic else "static: overflows are not looked for"
        named = "; ".join(earlier.describe() for earlier in others)
        log.info("the loss scalers of %s (%s) are now those of %s too, as in apex", session.describe(), kind, named)
