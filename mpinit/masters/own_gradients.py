"""Gradients that a backward pass computes for masters themselves, of a penalty over parameter groups say.

A weight's gradient and its master's are one: what arrives on the master is added to what arrives on the weight.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, final

import torch

from ..basics.gradients import add_
from ..distributed.sharding import has_other_processes
from ..torch_internals.parameter_watching import TENSOR_GRAD, Watcher
from .pairs import Pair, PairTable

_INSTEAD: Final = "make that part of the loss from the model's own parameters (model.parameters())"
_SPLIT: Final = (
    "the loss depends on parameters in optimizer.param_groups, which hold no numbers between steps with "
    f'master_weights="split" (they read as nan): {_INSTEAD}, or use master_weights=True'
)
_OTHER_PROCESSES: Final = (
    "the loss depends on float32 masters (parameters in optimizer.param_groups, mpinit.master_params), and gradients "
    f"of those are not averaged over ranks: {_INSTEAD}"
)
_RELEASES: Final = (
    "the loss depends on float32 masters (parameters in optimizer.param_groups, mpinit.master_params), and "
    "gradient_release=True steps a parameter before its master's own gradient may have arrived: "
    f"{_INSTEAD}, or leave gradient_release off"
)
_PARTED: Final = (
    "backward() adds to the gradient of a float32 master (the loss depends on mpinit.master_params or parameters in "
    "optimizer.param_groups) and to another one of its weight: clear gradients by optimizer.zero_grad(), not by "
    f"model.zero_grad() alone, and do not accumulate with create_graph=True, or {_INSTEAD}"
)


class _Hook:
    """What stands on each master. It holds nothing alive: masters are large, and cycles wait for the collector."""

    __slots__ = ("_owner",)

    def __init__(self, owner: OwnGradients) -> None:
        self._owner = weakref.ref(owner)

    def __call__(self, master: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.arrived(master)


@final
class OwnGradients:
    """Adds gradients that autograd leaves on masters to their weights'.

    Autograd comes to a master only where a loss was computed from it, so other losses cost nothing.

    Args:
        watcher: who knows of gradients that were assigned.
        pairs: whose.
        releases: whether parameters are stepped inside of backward passes.
    """

    def __init__(self, watcher: Watcher, pairs: PairTable, releases: bool) -> None:
        self._watcher = watcher
        self._pairs = pairs
        self._releases = releases

    def listen(self, pair: Pair) -> None:
        """From here on a pair's master is looked after."""
        master: Any = pair.master_param
        trained = master.requires_grad
        # torch puts a hook on nothing else, and a frozen weight may be trained later.
        master.requires_grad_(True)
        master.register_post_accumulate_grad_hook(_Hook(self))
        master.requires_grad_(trained)

    def arrived(self, master: torch.Tensor) -> None:
        """Autograd has given a master a gradient, or added to the one that it had.

        Raises:
            RuntimeError: the master holds no numbers, or what arrived cannot be told from what was there, or would
                not be seen by a step or by other ranks.
        """
        pair, watcher = self._pairs.of(master), self._watcher
        if pair is None or watcher.is_paused:
            return
        self._check(pair)
        weight, mine = pair.model_param, master.grad
        if mine is None or mine is weight.grad or id(master) in watcher.assigned:
            return  # autograd has added to the one; what was assigned, the next look sees to
        copies = next(iter(pair.holders), None)
        if copies is None:
            return  # nobody steps it
        known = copies.known_of(pair)
        if known is not None and (mine is known or torch.is_grad_enabled()):
            raise RuntimeError(_PARTED)
        # Held by both at once, so that autograd adds what the weight may still get to the sum.
        total = mine if weight.grad is None else _sum(weight.grad, mine)
        for parameter in (weight, master):
            TENSOR_GRAD.__set__(parameter, total)
        watcher.arrived[id(master)] = total

    def _check(self, pair: Pair) -> None:
        if pair.readable_param is not pair.master_param:
            raise RuntimeError(_SPLIT)
        if has_other_processes():
            raise RuntimeError(_OTHER_PROCESSES)
        if self._releases:
            raise RuntimeError(_RELEASES)


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():  # create_graph: the sum is part of a graph
        return one.float() + other
    wide = one if one.dtype == other.dtype else one.to(other.dtype)
    return add_([wide], [other])[0]
