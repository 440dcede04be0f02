"""The base of hooks of a model's forward that all ranks call equally often."""

import weakref
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ..torch_internals.running import current_pass, is_eager

Owner = TypeVar("Owner")


class ForwardHook(Generic[Owner]):
    """A hook of a forward, which calls a method of the object that registers it.

    In a copy of the module it does nothing. Register it with ``prepend=True``: then it runs before FSDP2's hooks, which
    gather parameters in the forward and in the backward pass.
    """

    def __init__(self, owner: Owner | None) -> None:
        self._owner: weakref.ref[Any] | None = None if owner is None else weakref.ref(owner)

    def owner(self) -> Owner | None:
        """Return the object; None if torch.compile traces the forward, or a backward pass computes it again."""
        if torch.compiler.is_compiling() or self._owner is None or current_pass() != -1 or not is_eager():
            return None
        # DistributedDataParallel around the module has reported its own forward.
        is_inside = nn.parallel.DistributedDataParallel._active_ddp_module is not None
        return None if is_inside else self._owner()

    def __reduce__(self) -> Any:
        return type(self), (None,)
