"""What every kind of masters can do. An optimizer's rooms speak to this interface alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..torch_internals.parameter_watching import Watcher
from .arrivals import Arrivals
from .own_gradients import OwnGradients
from .pairs import Pair, PairTable
from .states import PlainStates, StateStore
from .two_copies import TwoCopies

Gradients = list[torch.Tensor | None]


class MasterStore(ABC):
    """A session's masters.

    Args:
        scales: whether losses are scaled. Where not, masters show the gradients of any backward pass at once.
        releases: whether parameters are stepped inside of backward passes.

    Attributes:
        pairs: the weights that have masters.
        watcher: who records writes that leave no trace, on either side.
        idle: pairs in no optimizer's groups, for now.
        states: what optimizers' states are between steps.
        arrivals: who shows masters what backward passes leave on their weights.
    """

    def __init__(self, scales: bool = True, releases: bool = False) -> None:
        self.pairs = PairTable()
        self.watcher = Watcher()
        self.states: StateStore = PlainStates()
        self.arrivals = Arrivals(self.watcher, self.pairs, scales)
        self._own_gradients = OwnGradients(self.watcher, self.pairs, releases)
        # Pairs that no optimizer steps at the moment: their numbers stay, as other parameters' do.
        self.idle = TwoCopies(self.watcher, self.as_held, lambda parameter: f"a parameter of shape {parameter.shape}")

    def keep_states(self, states: StateStore) -> None:
        """Keep optimizers' states otherwise than as they are."""
        self.states = states

    def check_all(self, optimizers: Sequence[Optimizer]) -> None:
        """:meth:`check`, and whether their states can be kept as they are to be."""
        self.check(optimizers)
        self.states.check(optimizers)

    def take_in(self, weight: nn.Parameter, dtype: torch.dtype) -> Pair | None:
        """Make the pair of a weight that is, or is about to be cast to, ``dtype``, and know it from here on.

        Returns:
            The pair; None where the weight needs no master.
        """
        pair = self.make(weight, dtype)
        if pair is not None:
            self.pairs.add(pair)
            self.watcher.watch(pair.model_param)
            self.watcher.watch(pair.master_param, twin=pair.model_param)
            self._own_gradients.listen(pair)
            self.arrivals.changed()
        return pair

    def hold_idle(self) -> None:
        """Take down which pairs are in no optimizer's groups; what was known of those that were stays."""
        self.idle.hold([pair for pair in self.pairs if not pair.holders])

    def finish_idle(self) -> None:
        """:meth:`finish` for pairs in no optimizer's groups."""
        self.hold_idle()
        self.finish(self.idle.pairs)
        self.idle.hold(self.idle.pairs)
        self.idle.note_all()

    def let_go(self, pair: Pair) -> None:
        """Drop a master that is in no optimizer's groups: its weight is a plain parameter from here on."""
        pair.let_go()
        self._forget(pair)
        self.watcher.unwatch(pair.model_param)
        self.watcher.unwatch(pair.master_param)
        self.hold_idle()

    def close(self) -> None:
        """Forget every pair: weights are what their masters were."""
        self.watcher.close()
        self.idle.hold([])
        for pair in self.pairs:
            self._forget(pair)

    def _forget(self, pair: Pair) -> None:
        self.pairs.discard(pair)
        self.arrivals.changed()

    @abstractmethod
    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Before anything is changed: whether these optimizers can be stepped with masters of this kind.

        Raises:
            ValueError: one of them cannot; the message says why and what to do.
        """

    @abstractmethod
    def make(self, weight: nn.Parameter, dtype: torch.dtype) -> Pair | None:
        """A pair for a weight that is, or is about to be cast to, ``dtype``; None where it needs no master.

        A float32 weight hands its storage over without a copy: it is about to be cast, and gets new storage then.
        """

    @abstractmethod
    def finish(self, pairs: Sequence[Pair]) -> None:
        """These pairs' weights are 16-bit now: what had to wait for that."""

    @abstractmethod
    def as_held(self, gradients: Gradients) -> Gradients:
        """Gradients in the form in which pairs hold them between a backward pass and a step."""

    @abstractmethod
    def are_plain(self, copies: TwoCopies, gradients: Gradients, device: torch.device) -> bool:
        """Whether all gradients are there, dense, float32 and on ``device``: asked on every step."""

    @property
    @abstractmethod
    def steps_in_parts(self) -> bool:
        """Whether :meth:`stepping` may take more than one step."""

    @abstractmethod
    def adds_up_natively(self) -> bool:
        """Whether autograd itself can add onto the gradients that pairs hold, when nothing is to be unscaled."""

    @abstractmethod
    def stepping(
        self, optimizer: Optimizer, copies: TwoCopies, rounds_itself: bool = False
    ) -> AbstractContextManager[Iterator[None]]:
        """Around the optimizer's steps: iterate over the inside, one step an iteration.

        Weights and masters agree again afterwards, also where a step fails half way.

        Args:
            optimizer: whose step runs inside.
            copies: its pairs.
            rounds_itself: the step inside rounds the masters into the weights.
        """

    @abstractmethod
    def step_with_closure(
        self, optimizer: Optimizer, copies: TwoCopies, step: Callable[[Callable[[], Any] | None], Any], closure: Any
    ) -> Any:
        """Run an optimizer's step that evaluates ``closure``."""
