"""Modules that become parts of known ones later: adapters, parametrisations, a new head."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle


class Follower(Protocol):
    """Who wants to know of them."""

    def holds(self, module: nn.Module) -> bool:
        """Whether a module is known."""

    def take_in(self, tree: nn.Module) -> None:
        """A module has become a part of one that is known."""


def follow_newcomers(follower: Follower) -> RemovableHandle:
    """Tell ``follower`` of every module that becomes a part of one that it holds. It is known weakly."""
    known = weakref.ref(follower)

    def take_in(module: nn.Module, name: str, newcomer: nn.Module | None) -> None:
        alive = known()
        if alive is not None and newcomer is not None and alive.holds(module):
            alive.take_in(newcomer)

    handle: RemovableHandle = register_module_module_registration_hook(take_in)
    weakref.finalize(follower, handle.remove).atexit = False
    return handle
