"""Saving and loading what a session adds to a checkpoint: the loss scalers.

Masters need no place of their own: ``model.state_dict()`` holds their float32 bits, and loading it sets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .scaling.scaler import check_state
from .session import Session

_GRAD_SCALER = ("scale", "_growth_tracker")


def session_state(session: Session) -> dict[str, Any]:
    """The scalers' states as plain numbers, under ``loss_scaler0``, ``loss_scaler1``, ..."""
    return {f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(session.scalers)}


def load_session_state(session: Session, state: Mapping[str, Any]) -> None:
    """Set a session's scalers; a state that does not fit changes nothing.

    A static scale stays what it is, whatever was saved: see :meth:`LossScaler.load_state_dict`.

    Args:
        session: the session.
        state: of :func:`session_state`, or of ``torch.amp.GradScaler.state_dict()`` where there is one loss.

    Raises:
        TypeError: ``state`` is no mapping.
        ValueError: it does not fit; the message lists every difference.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is a mapping such as mpinit.state_dict() returns, not {type(state).__name__}")
    states = _from_grad_scaler(state) if all(key in state for key in _GRAD_SCALER) else dict(state)
    expected = [f"loss_scaler{index}" for index in range(len(session.scalers))]
    faults = [f"{key} is missing" for key in expected if key not in states]
    faults += [f"{key!r} is not known here" for key in states if key not in expected]
    faults += [f"{key} {fault}" for key in expected if key in states for fault in check_state(states[key])]
    if faults:
        raise ValueError(
            f"the state does not fit {session.describe()} with num_losses={len(session.scalers)}, and nothing was "
            f"loaded: {'; '.join(faults)}. Initialise with the num_losses the state was saved with"
        )
    for key, scaler in zip(expected, session.scalers, strict=True):
        scaler.load_state_dict(states[key])


def _from_grad_scaler(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"loss_scaler0": {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]}}
