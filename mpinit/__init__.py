"""Apex-style mixed precision for today's PyTorch: one-line initialisation, fp32 masters, loss scaling.

Example:
    >>> import torch, mpinit
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2", verbosity=0)
    >>> with mpinit.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
    ...     scaled_loss.backward()
    >>> optimizer.step()
    >>> mpinit.undo(model)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import amp as amp
from .amp import *  # noqa: F403 - its __all__ spells the names out
from .inspect.explain import explain as explain
from .inspect.exponents import gradient_histogram as gradient_histogram
from .inspect.history import History as History
from .inspect.overflow import overflow_report as overflow_report
from .inspect.overflow import watch_overflow as watch_overflow
from .inspect.stalled import stalled as stalled
from .inspect.suggest import suggest as suggest

__version__ = "0.1.0"

# mypy takes a list that is not spelt out for an empty one; without any, it and others export what they see here.
if not TYPE_CHECKING:
    __all__ = [
        *("__version__", "amp", "install_as_apex"),
        *("History", "explain", "gradient_histogram", "overflow_report", "stalled", "suggest", "watch_overflow"),
        *amp.__all__,
    ]


def install_as_apex() -> None:
    """Let ``from apex import amp`` and its kin, in this process, find mpinit's own equivalents."""
    # Imported here so that importing mpinit does not pay for the compatibility layer.
    from .compat import install_as_apex as install

    install()
