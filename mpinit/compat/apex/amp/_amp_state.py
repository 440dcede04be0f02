"""``_amp_state``: what scripts read and write behind amp's back, as live views of the latest session."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from .... import amp as mp
from .... import registry
from ._handles import AmpHandle, NoOpHandle
from ._sessions import training_session, unwrapped
from .scaler import LossScaler

_log = logging.getLogger("mpinit")

_OPTIONS = (
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
    "cast_model_outputs",
)


class OptProperties:
    """A session's properties under apex's names.

    Args:
        properties: the session's own, or None where amp is disabled.
        opt_level: the level's name.
    """

    def __init__(self, properties: mp.Properties | None, opt_level: str | None) -> None:
        values = {name: getattr(properties, name, None) for name in _OPTIONS}
        self.options: dict[str, Any] = {"enabled": properties is not None, "opt_level": opt_level, **values}

    def __getattr__(self, name: str) -> Any:
        if name != "options" and name in self.options:
            return self.options[name]
        raise AttributeError(
            f"there is no amp property {name!r}; there are {', '.join(self.__dict__.get('options', ()))}"
        )


class AmpState:
    """The one object of its kind is :data:`_amp_state`.

    Attributes:
        verbosity: how much the next ``initialize`` logs.
        hard_override: kept for scripts that set it; nothing here needs overriding.
        allow_incoming_model_not_fp32: let 16-bit models come in without a word.
        disabled: whether the latest ``initialize`` was given ``enabled=False``.
        init_handle: what ``amp.init`` returned, where that is in force.
    """

    def __init__(self) -> None:
        self.verbosity = 1
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.disabled = False
        self.init_handle: AmpHandle | None = None

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The loss scalers of the latest session that trains, readable and writable; one for each loss."""
        return [LossScaler.over(scaler) for scaler in training_session().scalers]

    @property
    def opt_properties(self) -> OptProperties:
        """The properties of the latest ``initialize``."""
        if self.disabled:
            return OptProperties(None, None)
        latest = registry.latest()
        if latest is None:
            raise AttributeError("amp has no properties before amp.initialize(...)")
        return OptProperties(latest.properties, latest.opt_level)

    @property
    def handle(self) -> AmpHandle | NoOpHandle:
        """The handle of patched functions; one that does nothing where none are patched."""
        latest = registry.latest()
        if self.init_handle is not None and self.init_handle.is_active():
            return self.init_handle
        if self.disabled or latest is None or not latest.plan.patch_functions:
            return NoOpHandle()
        return AmpHandle(latest.models[0]) if latest.models else NoOpHandle()


_amp_state = AmpState()


def master_params(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """Iterate over the parameters that ``optimizer.step()`` updates: masters where there are any.

    Args:
        optimizer: any optimizer, initialised or not.

    Yields:
        The parameters of its groups.
    """
    known = unwrapped(optimizer)
    if registry.of(known) is not None:
        yield from mp.master_params(known)
    else:
        for group in optimizer.param_groups:
            yield from group["params"]


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Log a message at the level INFO."""
    _log.info("%s", msg)


def warn_or_err(msg: str) -> None:
    """Raise a RuntimeError, or log a warning under ``hard_override``."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    _log.warning("%s", msg)
