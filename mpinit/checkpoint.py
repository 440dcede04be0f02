"""Saving and loading what a session adds to a checkpoint: the loss scalers.

Masters need no place of their own: ``model.state_dict()`` has their float32 bits, and loading it sets them.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

from .basics.logs import warn_user
from .scaling.scaler import check_state
from .session import Session

_GRAD_SCALER = ("scale", "_growth_tracker")

# Where scripts put the state of scalers in their checkpoints: mpinit's, apex's, torch.amp's.
_IN_CHECKPOINTS: Final = ("mpinit", "amp", "scaler", "grad_scaler")

# The columns of scalers_as_rows(); a tolerance of -1: the rule has no hysteresis.
_COLUMNS: Final = ("loss_scale", "unskipped", "tolerance", "scales")


def session_state(session: Session) -> dict[str, Any]:
    """Return the scalers' states as plain values, under ``loss_scaler0``, ``loss_scaler1``, ..."""
    return {f"loss_scaler{index}": each.state_dict() for index, each in enumerate(session.scalers)}


def load_session_state(session: Session, state: Mapping[str, Any]) -> None:
    """Set a session's scalers; a state that does not fit changes nothing.

    A static scale stays what it is, whatever was saved, and a dynamic one where nothing was scaled, with a warning: see
    :meth:`LossScaler.load_state_dict`.
    """
    parts = checked_state(session, state).values()
    refused = [scaler for scaler, part in zip(session.scalers, parts, strict=True) if not scaler.load_state_dict(part)]
    if refused:
        scales = ", ".join(dict.fromkeys(f"{scaler.loss_scale():g}" for scaler in refused))
        warn_user(
            "the state was saved where losses were not scaled (O0, O3, bfloat16), and its loss scale of 1 was not "
            f"loaded: in float16 small gradients would be 0 with it. The dynamic loss scale stays {scales}"
        )


def checked_state(session: Session, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of a session's scalers, in their order, if they can all be loaded."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is a mapping such as mpinit.state_dict() returns, not {type(state).__name__}")
    states = dict(state)
    if all(key in state for key in _GRAD_SCALER):
        states = {"loss_scaler0": {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]}}
    expected = [f"loss_scaler{index}" for index in range(len(session.scalers))]
    faults = [f"{key} is missing" for key in expected if key not in states]
    faults += [f"{key!r} is not known here" for key in states if key not in expected]
    faults += [f"{key} {fault}" for key in expected if key in states for fault in check_state(states[key])]
    if faults:
        inside = next((key for key in _IN_CHECKPOINTS if isinstance(state.get(key), Mapping)), None)
        way_out = (
            f"This is a whole checkpoint: the scalers' state is its entry {inside!r}"
            if inside is not None
            else "Initialise with the num_losses the state was saved with"
        )
        raise ValueError(
            f"the state does not fit {session.describe()} with num_losses={len(session.scalers)}, and nothing was "
            f"loaded: {'; '.join(faults)}. {way_out}"
        )
    return {key: states[key] for key in expected}


def scalers_as_rows(session: Session | None) -> torch.Tensor:
    """Return the scalers' states as numbers: a file of ``torch.distributed.checkpoint`` then shows whether it fits.

    Args:
        session: the session; None: nothing is initialised.

    Returns:
        (number of losses, 4), float64, on the CPU: loss scale, good updates, tolerance, and whether it scales at all.
    """
    usual = {"loss_scale": 1.0, "unskipped": 0, "tolerance": -1, "scales": True}
    states = [{"scales": False}] if session is None else [scaler.state_dict() for scaler in session.scalers]
    rows = [[(usual | state)[column] for column in _COLUMNS] for state in states]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def scalers_of_rows(rows: Any) -> dict[str, Any]:
    """Return what :func:`scalers_as_rows` was given: scalers' states by name."""
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2 or rows.shape[1] != len(_COLUMNS):
        found = f"have the shape {tuple(rows.shape)}" if isinstance(rows, torch.Tensor) else f"are {rows!r}"
        raise ValueError(
            f"scalers saved by mpinit.TrainState are rows of {', '.join(_COLUMNS)}; these {found}, and nothing was "
            "loaded. Load what mpinit.state_dict() returned by mpinit.load_state_dict()"
        )
    states: dict[str, Any] = {}
    for index, (scale, unskipped, tolerance, scales) in enumerate(rows.tolist()):
        counted = {} if tolerance < 0 else {"tolerance": _whole(tolerance)}
        others = counted if scales % 2 else {"scales": False}  # mpinit 0.4.0 added even numbers
        states[f"loss_scaler{index}"] = {"loss_scale": scale, "unskipped": _whole(unskipped)} | others
    return states


def _whole(number: float) -> int | float:
    return int(number) if number.is_integer() else number
