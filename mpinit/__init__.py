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

import importlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.3.0"

if TYPE_CHECKING:
    from . import amp as amp

    # mypy treats a list that is not spelt out as an empty one; without any, it and others export what they see here.
    from .amp import *  # noqa: F403 - its __all__ spells the names out
    from .compat import install_as_apex as install_as_apex
    from .inspect.audit import audit as audit
    from .inspect.changes import changes as changes
    from .inspect.explain import explain as explain
    from .inspect.fidelity import fidelity as fidelity
    from .inspect.overflow import overflow_report as overflow_report
    from .inspect.overflow import watch_overflow as watch_overflow
    from .inspect.suggest import suggest as suggest
else:
    # Names that a training does not need: imported when they are first read.
    _LATER = {
        "install_as_apex": "mpinit.compat",
        "audit": "mpinit.inspect.audit",
        "changes": "mpinit.inspect.changes",
        "explain": "mpinit.inspect.explain",
        "fidelity": "mpinit.inspect.fidelity",
        "overflow_report": "mpinit.inspect.overflow",
        "suggest": "mpinit.inspect.suggest",
        "watch_overflow": "mpinit.inspect.overflow",
    }

    # Names that release 0.2.0 had, and what replaces each.
    _REMOVED = {
        "broadcast_masters": "mpinit.TrainState does it, with StateDictOptions(broadcast_from_rank0=True)",
        "History": "in the loop `history.append((mpinit.loss_scale(optimizer), mpinit.step_was_skipped(optimizer)))`, "
        "or log these with the tracker of your run",
        "gradient_histogram": "`torch.frexp(parameter.grad).exponent.unique(return_counts=True)` counts its exponents",
        "stalled": "mpinit.audit(model, optimizer).stuck foresees it; to measure, `with mpinit.changes(optimizer) as "
        "changed: optimizer.step()`: weights that no `changed` names have not moved",
    }

    def __getattr__(name: str) -> object:
        """Import ``mpinit.amp`` with the first public name that is read, and what ``_LATER`` names each by itself.

        torch needs a second to import, amp with pydantic another 0.1 s, and the command line needs neither for its
        help and version. This is the only place that postpones an import for its time.
        """
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        if name in _REMOVED:
            raise AttributeError(f"mpinit.{name} was removed: {_REMOVED[name]}", name=name)
        if name == "__all__" or not name.startswith("_"):
            amp = importlib.import_module("mpinit.amp")
            globals().update({each: getattr(amp, each) for each in amp.__all__ if each in vars(amp)})
            globals()["__all__"] = ["__version__", "amp", *_LATER, *amp.__all__]
            if name in globals()["__all__"]:
                globals()[name] = getattr(importlib.import_module(_LATER.get(name, "mpinit.amp")), name)
        if name not in globals():
            raise AttributeError(f"module 'mpinit' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
