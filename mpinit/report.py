"""What is said about a session when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .logs import log
from .session import Session

_TOLD: Final = (
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)


def announce(session: Session, came_in_16_bit: Sequence[str]) -> None:
    """Log in one line what was set up, and in another which weights came in 16-bit already."""
    if session.verbosity < 1:
        return
    words = ", ".join(f"{name}={getattr(session.properties, name)}" for name in _TOLD)
    log.info("%s: %s", session.describe(), words)
    if came_in_16_bit:
        first = ", ".join(came_in_16_bit[:3])
        log.info("%s: %d weights came in 16-bit, first %s", session.describe(), len(came_in_16_bit), first)
