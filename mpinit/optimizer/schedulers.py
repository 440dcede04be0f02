"""Learning-rate schedulers that pass over the steps that their optimizer skipped."""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ..basics.patching import Undo


def wait_for_steps(scheduler: Any, was_skipped: Callable[[Optimizer], bool]) -> Undo:
    """Let ``scheduler.step`` do nothing where its optimizer skipped the last step.

    The scheduler stays the object it was, and of its class; its attributes, and with them its state dict, gain nothing.
    """
    kind = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if was_skipped(self.optimizer) else kind.step(self, *args, **kwargs)

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": functools.wraps(kind.step)(step)})
    return functools.partial(setattr, scheduler, "__class__", kind)
