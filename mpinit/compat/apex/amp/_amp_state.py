"""``_amp_state``, apex's private state that scripts read and write: live views of the latest session."""

from types import SimpleNamespace
from typing import Any

from .... import amp as mp
from ... import _core
from .scaler import LossScaler


def training_session() -> Any:
    """Return the latest session with optimizers, or else the latest. A teacher's session has none, and no loss.

    Raises:
        AttributeError: there is no session yet, as in apex before ``initialize``.
    """
    live = _core.live_sessions()
    training = [session for session in live if session.optimizers] or live
    if not training:
        raise AttributeError("amp has no loss scalers before amp.initialize(...)")
    return training[-1]


class AmpState:
    """apex's private state. :data:`_amp_state` is the one instance.

    Attributes:
        verbosity: the verbosity of the latest ``initialize``.
        allow_incoming_model_not_fp32: True: ``initialize`` does not warn about 16-bit models.
        disabled: whether the latest ``initialize`` was called with ``enabled=False``.
        handle: the handle of ``amp.init`` until it is deactivated; otherwise that of ``amp.initialize``.
    """

    def __init__(self) -> None:
        self.verbosity = 1
        self.allow_incoming_model_not_fp32 = False
        self.disabled = False
        self.handle: Any = None

    @property
    def has_no_scalers(self) -> bool:
        """Return whether amp is disabled and no earlier session is live; a live one goes on with its scalers."""
        return self.disabled and not _core.live_sessions()

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The loss scalers of the latest session that trains, readable and writable; one for each loss."""
        return [LossScaler(scaler) for scaler in training_session().scalers]

    @property
    def opt_properties(self) -> Any:
        """The properties of the latest ``initialize`` under apex's names, and all of them as ``options``."""
        live = _core.live_sessions()
        if not live and not self.disabled:
            raise AttributeError("amp has no properties before amp.initialize(...)")
        latest = None if self.disabled else live[-1]
        options = dict(latest.properties) if latest else dict.fromkeys(mp.Properties.model_fields)
        options |= {"enabled": latest is not None, "opt_level": latest.opt_level if latest else None}
        return SimpleNamespace(options=options, **options)


_amp_state = AmpState()
master_params = mp.master_params
