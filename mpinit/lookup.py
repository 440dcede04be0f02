"""From what a user names, an optimizer or nothing at all, to the session meant."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer

from . import session as sessions
from .session import Session

# Optimizers and models that initialize(enabled=False) was called on: everything is a no-op for them.
disabled: weakref.WeakSet[Any] = weakref.WeakSet()


def session_of(optimizer: Any) -> Session:
    """The live session of an optimizer or model; a RuntimeError that lists the sessions where it has none."""
    session = sessions.of(optimizer)
    if session is None:
        known = "; ".join(live.describe() for live in sessions.live()) or "there are none"
        raise RuntimeError(
            f"this {type(optimizer).__name__} was not initialised: pass it to mpinit.initialize first. Live sessions: "
            f"{known}"
        )
    return session


def shared_session(optimizers: list[Optimizer]) -> Session | None:
    """The session that all the optimizers share; None where they are disabled, or there is none to speak of."""
    owning = [sessions.of(optimizer) for optimizer in optimizers]
    if not owning:
        live = sessions.live()
        return live[0] if len(live) == 1 else None
    if owning[0] is None or any(session is not owning[0] for session in owning):
        if all(optimizer in disabled for optimizer in optimizers):
            return None
        named = " and ".join(dict.fromkeys(session_of(optimizer).describe() for optimizer in optimizers))
        raise ValueError(f"one loss cannot be scaled by {named} at once: pass their optimizers to one initialize call")
    return owning[0]


def session_meant(optimizer: Optimizer | None) -> Session | None:
    """The optimizer's session, or without one the only live session; None where disabled.

    Raises:
        RuntimeError: there is no such session, or more than one to choose from.
    """
    if optimizer is not None:
        return None if optimizer in disabled else session_of(optimizer)
    live = sessions.live()
    if len(live) == 1:
        return live[0]
    if not live and len(disabled):
        return None
    known = "; ".join(session.describe() for session in live) or "none: call mpinit.initialize first"
    raise RuntimeError(f"which session is meant? Give an optimizer of it. Live sessions: {known}")
