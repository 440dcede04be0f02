"""Messages to users: a logger that logs on rank 0 only, and warnings at the user's line."""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Final

import torch


def _speaks(record: logging.LogRecord) -> bool:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_rank() == 0


log = logging.getLogger("mpinit")
log.addFilter(_speaks)


# The files of mpinit, and those of torch: a user's call of a method of torch may call a hook of mpinit.
_NOT_THE_USERS: Final = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)


def _is_not_the_users(frame: Any) -> bool:
    # Code that torch.fx generates has no module. Python drops warnings of code without one.
    return "__name__" not in frame.f_globals or frame.f_code.co_filename.startswith(_NOT_THE_USERS)


def warn_user(message: str) -> None:
    """Warn at the line of the nearest caller outside of this package and torch."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _is_not_the_users(frame):
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
