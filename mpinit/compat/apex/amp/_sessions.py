"""Finding mpinit's session from the objects that scripts hold."""

from __future__ import annotations

from typing import Any

from .... import registry
from ....session import Session
from ..parallel.LARC import LARC


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that amp knows: inside a LARC that was put around it after ``initialize``."""
    while isinstance(optimizer, LARC) and registry.of(optimizer) is None:
        optimizer = optimizer.optim
    return optimizer


def training_session() -> Session:
    """The latest session that has optimizers, or else the latest: a teacher's has no loss of its own.

    Raises:
        AttributeError: there is none, as there is no such attribute of apex's state before ``initialize``.
    """
    live = registry.live()
    training = [session for session in live if session.optimizers] or live
    if not training:
        raise AttributeError("amp has no loss scalers before amp.initialize(...)")
    return training[-1]
