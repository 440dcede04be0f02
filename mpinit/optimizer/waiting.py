"""Weights whose optimizer comes later: their masters are made at once, and stand in no optimizer's groups."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.patching import Undo
from ..masters.store import MasterStore
from ..masters.two_copies import NameOf
from ..model.casting import TensorCasts
from ..torch_internals.step_hooks import before_every_step
from .controls import Controls


@final
class WaitingWeights:
    """The trainable weights of a session that no optimizer has taken yet.

    Args:
        awaits: whether any optimizer is expected; where none is, nothing is kept for it.
        controls: the session's optimizers.
        store: where masters live.
        name_of: a parameter's dotted name, for errors.
    """

    def __init__(self, awaits: bool, controls: Controls, store: MasterStore, name_of: NameOf) -> None:
        self.awaits = awaits
        self._controls = controls
        self._store = store
        self._name_of = name_of
        self._accept_steps: Undo = lambda: None

    def weights(self) -> list[nn.Parameter]:
        """Those that are left."""
        return self._controls.waiting() if self.awaits else []

    def keep(self, targets: Mapping[torch.Tensor, torch.dtype]) -> None:
        """Make masters of them, before anything is cast.

        Args:
            targets: the dtypes that parameters are about to be cast to.
        """
        for weight in self.weights():
            if self._store.pairs.of(weight) is None:
                self._store.take_in(weight, targets.get(weight, weight.dtype))
        if self.awaits and len(self._store.pairs):
            known = weakref.ref(self)
            self._accept_steps = before_every_step(lambda optimizer: _check(known(), optimizer))

    def end(self) -> None:
        """The session ends, or its set-up failed."""
        self._accept_steps()

    def note_taken(self) -> None:
        """Optimizers have come: where they took everything, nobody's step has to be looked at any more."""
        if not any(pair.model_param.requires_grad for pair in self._store.idle.pairs):
            self._accept_steps()

    def bring_along(self) -> None:
        """The model may have been moved: so are the float32 values."""
        for pair in self._store.idle.pairs:
            pair.follow_device()

    def let_go(self, casts: TensorCasts) -> None:
        """No optimizer is going to come: the weights are 16-bit and nothing else from here on.

        Args:
            casts: who gives weights without masters their dtype back in the end.
        """
        weights, self.awaits = self.weights(), False
        self._accept_steps()
        self.bring_along()
        for weight in weights:
            pair = self._store.pairs.of(weight)
            if pair is not None and not pair.holders:
                self._store.idle.look_at_weight(pair)
                self._store.let_go(pair)
                casts.take_over(weight, pair.came_in)
        casts.leave_to_optimizers(weights)

    def check_step(self, optimizer: Optimizer) -> None:
        """Refuse that an optimizer which nobody has added steps 16-bit weights, and their masters do not know.

        Raises:
            RuntimeError: it would.
        """
        if not self.awaits or self._controls.has(optimizer):
            return
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            pair = self._store.pairs.of(parameter)
            if pair is not None and pair.model_param is parameter:
                raise RuntimeError(
                    f"this {type(optimizer).__name__} steps {self._name_of(parameter)!r}, which mpinit.initialize has "
                    "cast to 16 bit and whose float32 values wait for an optimizer: call "
                    "mpinit.add_optimizers(optimizer) before its first step"
                )


def _check(waiting: WaitingWeights | None, optimizer: Optimizer) -> None:
    if waiting is not None:
        waiting.check_step(optimizer)
