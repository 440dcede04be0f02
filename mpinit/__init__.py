"""Apex-style mixed precision for today's PyTorch: one-line initialisation, fp32 masters, loss scaling.

Example:
    >>> import torch, mpinit
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
    >>> with mpinit.scale_loss(model(torch.ones(1, 4)).mean(), optimizer) as scaled_loss:
    ...     scaled_loss.backward()
    >>> optimizer.step()
    >>> mpinit.undo(model)
"""

from . import amp
from .amp import *  # noqa: F403 - its __all__ spells the names out
from .compat import install_as_apex
from .inspect.audit import audit
from .inspect.explain import explain
from .inspect.fidelity import fidelity
from .inspect.overflow import overflow_report, watch_overflow

__version__ = "0.4.0"

__all__ = ["__version__", "amp", "audit", "explain", "fidelity", "install_as_apex", "overflow_report", "watch_overflow"]
__all__ += amp.__all__
