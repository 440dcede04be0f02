"""When a DistributedDataParallel has been made, which torch has no hook for.

torch 2.11 to 2.13: it registers its ``module`` first, sends the weights, and calls ``self._ddp_init_helper`` last, of
torch/nn/parallel/distributed.py. One that does not is found at the first step under it. Can go when torch has a hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

from torch import nn


def when_made(tell: Callable[[Any], None]) -> Callable[[], None]:
    """Call a method with every DistributedDataParallel of this process as it is made, once it has sent its weights.

    That is where all of its ranks are together: one of them may have no batch, and never step, under ``join()``.

    Args:
        tell: what to call with it; held weakly.

    Returns:
        The undo.
    """
    weakly: Any = weakref.WeakMethod(tell)

    def notice(wrapper: nn.Module, name: str, inside: Any) -> None:
        if name == "module" and isinstance(wrapper, nn.parallel.DistributedDataParallel):
            made = vars(wrapper).setdefault("_ddp_init_helper", _Making(wrapper))
            made.tells.append(weakly)

    handle: Any = nn.modules.module.register_module_module_registration_hook(notice)
    # Also where whoever is to be called is dropped without an undo.
    weakref.finalize(weakly().__self__, handle.remove)
    undo: Callable[[], None] = handle.remove
    return undo


@final
class _Making:
    """The last thing that a DistributedDataParallel calls while it is made, and who is told then."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.tells: list[Callable[[], Callable[[Any], None] | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        wrapper = self._wrapper
        del wrapper._ddp_init_helper
        type(wrapper)._ddp_init_helper(wrapper, *args, **kwargs)
        for weakly in self.tells:
            tell = weakly()
            if tell is not None:
                tell(wrapper)
