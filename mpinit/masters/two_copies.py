"""The law of two copies: of every number that a weight and its master both hold, which of the two is true.

* A weight's gradient and its master's are one. Whichever side was changed since the last look counts: replaced or
  cleared; edited in place it is the same tensor anyway. Both changed, and differently, is an error. Where they are one
  tensor, clearing the master's clears the weight's at once: autograd would add to it. What a backward pass computes for
  the master itself is added to the weight's (:mod:`.own_gradients`).
* A weight and its master are one. Whichever side was written to since the last look counts, element by element (by
  blocks of 64 with split masters): what was not written keeps its low bits. Both written, and differently, is an error.
  Values put into a weight and taken out again before the next step cost no low bits.
* Whether a weight is trained is one as well: ``requires_grad`` of whichever side was changed counts.

A look is taken before whatever reads the other side: a forward pass (masters into weights), a backward pass and a
step, ``zero_grad``, ``master_params``, a state dict, and undoing. Nobody else compares versions or gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_
from typing import final

import torch

from ..torch_internals.allocator import HighestGradient
from ..torch_internals.columns import are_trained, do_all, grads_of, set_grads, versions_of
from ..torch_internals.parameter_watching import Shown, Watcher
from .pairs import Pair

NameOf = Callable[[torch.Tensor], str]
Gradients = list[torch.Tensor | None]


@final
class TwoCopies:
    """The pairs in one optimizer's groups, in columns for what runs on every step, and what was last known of them.

    Args:
        watcher: who knows of writes that leave no trace.
        as_held: brings a gradient into the form in which a pair holds it.
        name_of: a weight's dotted name, for errors.
    """

    def __init__(self, watcher: Watcher, as_held: Callable[[Gradients], Gradients], name_of: NameOf) -> None:
        self.pairs: list[Pair] = []
        self.weights: list[torch.Tensor] = []
        self._index: dict[Pair, int] = {}
        self.masters: list[torch.Tensor] = []
        self._own: set[int] = set()
        self._shared: list[Pair] = []
        # Those that rounding all at once leaves infinite.
        self.clamped: list[Pair] = []
        self._watcher = watcher
        self._as_held = as_held
        self._name_of = name_of
        self._gradients: Gradients = []
        self._weight_versions: list[int] = []
        self._master_versions: list[int] = []
        self._trained: list[bool] = []
        # Pairs that still know what their weights were before somebody wrote to them.
        self._followed: set[Pair] = set()
        self._highest = HighestGradient([])
        # The one device of all weights, where there is one.
        self.device: torch.device | None = None

    def hold(self, pairs: Sequence[Pair]) -> None:
        """From here on these are the pairs; what was known of those that stay is kept."""
        known = {
            id(pair): (gradient, weight_version, master_version)
            for pair, gradient, weight_version, master_version in zip(
                self.pairs, self._gradients, self._weight_versions, self._master_versions, strict=True
            )
        }
        self.pairs = list(pairs)
        for pair in self._followed.difference(self.pairs):
            self._followed.discard(pair)
            pair.forget_before()
        self._index = {pair: index for index, pair in enumerate(self.pairs)}
        self.weights = [pair.model_param for pair in self.pairs]
        self.masters = [pair.master_param for pair in self.pairs]
        rows = [known.get(id(pair)) or _first_look(pair) for pair in self.pairs]
        self._gradients = [row[0] for row in rows]
        self._weight_versions = [row[1] for row in rows]
        self._master_versions = [row[2] for row in rows]
        self._trained = [pair.trained for pair in self.pairs]
        self._highest = HighestGradient(self.weights)
        self._own = {id(parameter) for parameter in (*self.weights, *self.masters)}
        self.find_shared()
        self.clamped = [pair for pair in self.pairs if pair.clamps]
        devices = {weight.device for weight in self.weights}
        self.device = devices.pop() if len(devices) == 1 else None

    def find_shared(self) -> None:
        """Find the pairs that other optimizers step as well: what is noted of them is noted for all."""
        self._shared = [pair for pair in self.pairs if len(pair.holders) > 1]

    # -- gradients ----------------------------------------------------------------------------------------------

    def look_at_gradients(self) -> Gradients:
        """Make each pair's two gradients one.

        Returns:
            The gradients, in the pairs' order.

        Raises:
            RuntimeError: both sides' were changed, to different ones.
        """
        ours, theirs = grads_of(self.masters), grads_of(self.weights)
        if all(map(is_, ours, theirs)):
            if not all(map(is_, ours, self._gradients)):
                self._highest.keep(ours)
            self._gradients = ours
            self._are_known()
            return ours
        true = [
            other if other is mine or mine is known else self._not_the_weights(pair, mine, other, known)
            for pair, mine, other, known in zip(self.pairs, ours, theirs, self._known(), strict=True)
        ]
        held = self._as_held(true)
        self.put_gradients(held)
        return held

    def _are_known(self) -> None:
        watcher = self._watcher
        if watcher.assigned or watcher.cleared:
            do_all(map(watcher.assigned.pop, self._own, repeat(None)))
            watcher.cleared -= self._own
        if watcher.arrived:
            do_all(map(watcher.arrived.pop, map(id, self.masters), repeat(None)))

    def look_at_masters_gradients(self) -> None:
        """Before a backward pass that adds to the weights' gradients: they follow what was done to the masters'."""
        if not all(map(is_, grads_of(self.masters), self._gradients)) or self._watcher.arrived:
            self.look_at_gradients()

    def _known(self) -> Gradients:
        """What the two sides' gradients were when they were last one: looked at, or cleared or left there at once."""
        if not self._watcher.cleared and not self._watcher.arrived:
            return self._gradients
        return list(map(self.known_of, self.pairs))

    def known_of(self, pair: Pair) -> torch.Tensor | None:
        """What a pair's two gradients were when they were last one."""
        master = pair.master_param
        seen = self._watcher.arrived.get(id(master), self._gradients[self._index[pair]])
        seen = seen.known(master.grad) if isinstance(seen, Shown) else seen
        return None if id(master) in self._watcher.cleared else seen

    def _not_the_weights(
        self, pair: Pair, mine: torch.Tensor | None, other: torch.Tensor | None, known: torch.Tensor | None
    ) -> torch.Tensor | None:
        if other is known or _equal(mine, other):
            return mine
        raise RuntimeError(
            f"the gradient of {self._name_of(pair.model_param)!r} was changed on the weight and, differently, on its "
            "float32 master since they were last one: change one of them, model.parameters()'s or "
            "mpinit.master_params()'s"
        )

    def put_gradients(self, gradients: Gradients, weights_have_them: bool = False) -> None:
        """Give both sides of each pair its gradient, in the form in which pairs hold it."""
        set_grads(self.masters, gradients)
        if not weights_have_them:
            set_grads(self.weights, gradients)
        self._are_known()
        for pair in self._shared:
            for copies in pair.holders:
                copies._gradients[copies._index[pair]] = pair.master_param.grad
        self._gradients = gradients
        self._highest.keep(gradients)

    def left_by_backward(self) -> Pair | None:
        """A pair whose weight got a gradient by a backward pass since the last look that its master does not have."""
        for pair, known in zip(self.pairs, self._gradients, strict=True):
            gradient = pair.model_param.grad
            new = gradient is not None and gradient is not known and gradient is not pair.master_param.grad
            if new and id(pair.model_param) not in self._watcher.assigned:
                return pair
        return None

    # -- weights ------------------------------------------------------------------------------------------------

    def look_at_weights(self) -> None:
        """Before a step: masters follow what was written to weights.

        Masters that were written to need nothing: the step rounds them all.

        Raises:
            RuntimeError: both sides were written to, differently.
        """
        versions = versions_of(self.weights)
        if versions != self._weight_versions or self._watcher.handed_out:
            for index, (pair, version) in enumerate(zip(self.pairs, versions, strict=True)):
                if version != self._weight_versions[index] or self._watcher.was_written(pair.model_param):
                    self._look_at(index)

    def look_at_masters(self) -> None:
        """Before a forward pass: weights follow what was written to masters.

        Masters need not follow weights yet, so values put in for an evaluation never reach them.

        Raises:
            RuntimeError: both sides were written to, differently.
        """
        versions = versions_of(self.masters)
        if versions != self._master_versions or self._watcher.handed_out:
            for index in range(len(self.pairs)):
                if self._master_was_written(index):
                    self._look_at(index)

    def look_at_both(self) -> None:
        """Before anything else that reads either side: each follows the other.

        Raises:
            RuntimeError: both sides were written to, differently.
        """
        self.look_at_weights()
        self.look_at_masters()

    def look_at_weight(self, pair: Pair) -> None:
        """:meth:`look_at_weights` for one pair."""
        index = self._index.get(pair)
        if index is None:
            return
        self._look_at(index)

    def _look_at(self, index: int) -> None:
        pair = self.pairs[index]
        weight, master = self._weight_was_written(index), self._master_was_written(index)
        if weight and master and not pair.agree():
            raise RuntimeError(
                f"{self._name_of(pair.model_param)!r} was written to and, differently, its float32 master since they "
                "were last one: write to one of them, to the model's or to the optimizer's side"
            )
        if weight and not master:
            pair.follow_weight()
            self._followed.add(pair)
        elif master and not weight:
            pair.follow_master()
        if weight or master:
            self.note_one(pair)

    def _weight_was_written(self, index: int) -> bool:
        weight = self.pairs[index].model_param
        return weight._version != self._weight_versions[index] or self._watcher.was_written(weight)

    def _master_was_written(self, index: int) -> bool:
        master = self.pairs[index].master_param
        return master._version != self._master_versions[index] or self._watcher.was_written(master)

    def end(self) -> list[str]:
        """A last look, for undoing, which refuses nothing: where both sides differ the master's number counts.

        Returns:
            The names of weights where they did; their gradients are dropped where those differ.
        """
        names = []
        for index, (pair, known) in enumerate(zip(self.pairs, self._known(), strict=True)):
            mine, other = pair.master_param.grad, pair.model_param.grad
            if other is not mine and mine is not known and other is not known and not _equal(mine, other):
                pair.master_param.grad = pair.model_param.grad = None
                names.append(self._name_of(pair.model_param))
            try:
                self._look_at(index)
            except RuntimeError:
                # One that holds no numbers has none to follow.
                with contextlib.suppress(RuntimeError):
                    pair.follow_master()
                self.note_one(pair)
                names.append(self._name_of(pair.model_param))
        self.look_at_gradients()
        self.look_at_trained()
        return list(dict.fromkeys(names))

    def note_one(self, pair: Pair) -> None:
        """What one pair holds now is what both sides hold: from here on a change is somebody's write."""
        for copies in pair.holders or (self,):
            index = copies._index.get(pair)
            if index is not None:
                copies._weight_versions[index] = pair.model_param._version
                copies._master_versions[index] = pair.master_param._version
                if pair.clamps and pair not in copies.clamped:
                    copies.clamped.append(pair)
        self._watcher.forget(pair.model_param)
        self._watcher.forget(pair.master_param)

    def note_all(self, copied_once: bool = False) -> None:
        """:meth:`note_one` for every pair.

        Args:
            copied_once: since the last look each weight has been copied to once and nothing else happened to it, so
                that the versions need not be read.
        """
        if copied_once:
            self._weight_versions = [version + 1 for version in self._weight_versions]
        else:
            self._weight_versions = versions_of(self.weights)
        self._master_versions = versions_of(self.masters)
        self._watcher.forget_all(self._own)
        for pair in self._shared:
            self.note_one(pair)
        while self._followed:
            self._followed.pop().forget_before()

    # -- membership ---------------------------------------------------------------------------------------------

    def look_at_trained(self, to_step: bool = False, of_masters: bool = False) -> None:
        """``requires_grad`` of either side follows the one that was changed.

        Args:
            to_step: only for a step, which asks for gradients: where all were trained and have some, it has what it
                needs, and what was frozen since shows at the next look.
            of_masters: only what was done to masters: before a forward pass, which asks the weights alone.
        """
        if to_step and all(self._trained) and self._gradients and not any(map(is_, self._gradients, repeat(None))):
            return
        if self._trained == are_trained(self.masters) and (of_masters or self._trained == are_trained(self.weights)):
            return
        for pair in self.pairs:
            ours, theirs = pair.master_param.requires_grad, pair.model_param.requires_grad
            pair.trained = theirs if theirs != pair.trained else ours
            pair.model_param.requires_grad_(pair.trained)
            pair.master_param.requires_grad_(pair.trained)
        self._trained = [pair.trained for pair in self.pairs]


def _first_look(pair: Pair) -> tuple[torch.Tensor | None, int, int]:
    weight, master = pair.model_param, pair.master_param
    return master.grad, weight._version, master._version


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.is_sparse or other.is_sparse:
        return one is other
    return one.shape == other.shape and torch.equal(one.float(), other.float())
