"""An optimizer's parameter groups: masters in the places of 16-bit weights, and who takes part in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..masters.pairs import Pair
from ..masters.store import MasterStore
from ..masters.two_copies import NameOf, TwoCopies
from ..torch_internals.fused_sgd import stepped_wrongly
from .bystanders import OtherParameters
from .references import References
from .state import move_state, wrapped_by


@final
class ParameterGroups:
    """The parameters of one optimizer, and of those that it wraps.

    Membership is read from the groups whenever somebody asks, by identity: entries may be replaced, removed, added
    and frozen behind our back.

    Args:
        optimizer: the optimizer, changed in place.
        store: where masters live.
        targets: the dtypes that parameters are about to be cast to.
        name_of: a weight's dotted name, for errors.
        bystanders: who knows of gradients that a scaled loss has left behind the optimizer's back.
        original_values: what a weight was before it was cast without a master, where that is known.

    Attributes:
        copies: the pairs in the groups, each once.
        plain: the parameters in the groups that have no master, each once.
        generation: goes up whenever the members change.
        unsound: groups that must not be stepped by a fused kernel.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: MasterStore,
        targets: Mapping[torch.Tensor, torch.dtype],
        name_of: NameOf,
        bystanders: OtherParameters,
        original_values: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> None:
        self.optimizer = optimizer
        self.store = store
        self.copies = TwoCopies(store.watcher, store.as_held, name_of)
        self.plain: list[nn.Parameter] = []
        self.unsound: list[dict[str, Any]] = []
        self._targets = targets
        self._bystanders = bystanders
        self._original_values = original_values
        self._finished = False
        self.generation = 0
        # The groups at the last look, and what was in them.
        self._seen: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        self._frozen: list[nn.Parameter] = []
        self._references = References(optimizer)
        # Parameters that are their own masters and came in 16-bit.
        self._widened: dict[nn.Parameter, torch.dtype] = {}

    def _groups(self) -> Iterator[dict[str, Any]]:
        """The groups of the optimizer and of those it wraps, each once."""
        seen: set[int] = set()
        for each in (self.optimizer, *wrapped_by(self.optimizer)):
            for group in each.param_groups:
                if id(group) not in seen:
                    seen.add(id(group))
                    yield group

    def holders(self) -> list[Optimizer]:
        """Those who keep state for the parameters: the optimizer and those that it wraps."""
        return [self.optimizer, *wrapped_by(self.optimizer)]

    def present(self) -> list[nn.Parameter]:
        """Every entry of the optimizer's own groups, in order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def model_params(self) -> Iterator[nn.Parameter]:
        """The model's parameters that the members are or stand for."""
        yield from (pair.model_param for pair in self.copies.pairs)
        yield from self.plain

    def refresh(self) -> None:
        """Notice changed groups, and parameters that have become trainable; cheap where nothing changed."""
        if not self.is_as_seen() or any(parameter.requires_grad for parameter in self._frozen):
            self.put_masters()

    def is_as_seen(self) -> bool:
        """Whether the groups hold the same parameters as at the last look."""
        groups, seen = self.optimizer.param_groups, self._seen
        if len(groups) != len(seen):
            return False
        for group, (known, members) in zip(groups, seen, strict=True):
            params = group["params"]
            if group is not known or len(params) != len(members) or not all(map(is_, params, members)):
                return False
        return True

    def show_a_part(self) -> bool:
        """Whether a step is going on of which the groups show a part: others have gradients or numbers elsewhere."""
        return self.store.watcher.is_paused and (self.store.steps_in_parts or self.store.states.steps_in_parts)

    def are_without_gradients(self) -> bool:
        """Whether nothing that the next step uses has a gradient."""
        return all(member.grad is None for group in self.optimizer.param_groups for member in group["params"])

    # -- masters ------------------------------------------------------------------------------------------------

    def put_masters(self) -> None:
        """Replace every trainable 16-bit parameter in the groups by its master, its state carried over."""
        members = list(dict.fromkeys(p for group in self._groups() for p in group["params"]))
        scaled = [parameter for parameter in members if self._bystanders.reached(parameter)]
        fresh: list[Pair] = []
        came_in = [parameter.dtype for parameter in members]
        try:
            # By id: a tensor's own hash is slow, and a model has many.
            pairs = {id(parameter): self._pair_for(parameter, fresh) for parameter in members}
        except BaseException:
            for made in fresh if self._finished else ():
                self.store.let_go(made)
            raise
        holders = self.holders()
        for parameter, dtype in zip(members, came_in, strict=True):
            if parameter.dtype != dtype:
                self._widened[parameter] = dtype
                move_state(holders, parameter, parameter, dtype, parameter.dtype)
        for group in self._groups():
            for index, parameter in enumerate(group["params"]):
                pair = pairs[id(parameter)]
                if pair is not None and parameter is not pair.master_param:
                    group["params"][index] = pair.master_param
                    move_state(holders, parameter, pair.master_param, parameter.dtype, torch.float32)
        self._take_stock()
        if self._finished:
            self.store.finish(fresh)
            self._bystanders.still_reached(scaled)
            for pair in fresh:
                original = self._original_values(pair.model_param)
                if original is not None:
                    pair.load(original)
                    self.copies.note_one(pair)
            self.copies.hold(self.copies.pairs)
            self.store.states.put_in_form(self.optimizer, self.holders())

    def _pair_for(self, parameter: nn.Parameter, fresh: list[Pair]) -> Pair | None:
        pair = self.store.pairs.of(parameter)
        if pair is not None or not parameter.requires_grad:
            return pair
        pair = self.store.take_in(parameter, self._targets.get(parameter, parameter.dtype))
        if pair is not None:
            fresh.append(pair)
        return pair

    def _take_stock(self) -> None:
        """Take down who is in the groups now."""
        members = list(dict.fromkeys(p for group in self._groups() for p in group["params"]))
        found = [(parameter, self.store.pairs.of(parameter)) for parameter in members]
        pairs = list(dict.fromkeys(pair for _, pair in found if pair is not None))
        before, now = set(self.copies.pairs), set(pairs)
        for pair in now - before:
            for copies in (*pair.holders, self.store.idle):
                copies.look_at_weight(pair)
            pair.holders.add(self.copies)
        for pair in before - now:
            self.copies.look_at_weight(pair)
            pair.holders.discard(self.copies)
        self.copies.hold(pairs)
        # Each once, whatever the number of pairs.
        for copies in {copies for pair in before ^ now for copies in pair.holders}:
            copies.find_shared()
        if self._finished:
            self.store.hold_idle()  # while a session is set up, once for all optimizers
        self._references.replace({id(pair.model_param): pair.master_param for pair in pairs})
        self.plain = [parameter for parameter, pair in found if pair is None]
        self._frozen = [parameter for parameter in self.plain if not parameter.requires_grad]
        self.unsound = stepped_wrongly((self.optimizer, *wrapped_by(self.optimizer)), self._groups(), self._targets)
        self._seen = [(group, list(group["params"])) for group in self.optimizer.param_groups]
        self.generation += 1

    def finish(self) -> None:
        """Set-up is over and weights are 16-bit."""
        self._targets = {}
        self._finished = True
        self.store.finish(self.copies.pairs)
        self.copies.hold(self.copies.pairs)
        self.copies.note_all()
        self.store.states.put_in_form(self.optimizer, self.holders())

    def take_in_new_group(self) -> None:
        """Put masters into the group that was just added.

        Raises:
            ValueError: it names a weight again whose master is in another group; the group is taken out again.
        """
        groups = self.optimizer.param_groups
        known = {id(member) for _, members in self._seen for member in members}
        pairs = [self.store.pairs.of(parameter) for parameter in groups[-1]["params"]]
        if any(pair is not None and id(pair.master_param) in known for pair in pairs):
            groups.pop()
            raise ValueError("some parameters appear in more than one parameter group; the group was not added")
        self.put_masters()

    def restore_weights(self, of_master: Mapping[int, nn.Parameter]) -> None:
        """Put the model's own parameters back into the groups, with the state of their masters.

        Args:
            of_master: the id of every master of the session -> its weight.
        """
        for group in self._groups():
            for index, parameter in enumerate(group["params"]):
                group["params"][index] = of_master.get(id(parameter), parameter)
        self._references.replace(of_master)
        holders = self.holders()
        if not self._finished:
            for parameter, came_in in self._widened.items():
                move_state(holders, parameter, parameter, torch.float32, came_in)
        for key in dict.fromkeys(key for holder in holders for key in holder.state if id(key) in of_master):
            weight = of_master[id(key)]
            move_state(holders, key, weight, key.dtype, weight.dtype)
        # Nothing of the masters is kept alive.
        self.copies.hold([])
        self._seen = []

    def leave(self) -> None:
        """Masters are nothing of this optimizer's any more: those that nobody else steps are idle."""
        pairs = self.copies.pairs
        self._references.replace({id(pair.master_param): pair.model_param for pair in pairs})
        self.copies.hold([])
        self._seen = []
        for pair in pairs:
            pair.holders.discard(self.copies)
        for copies in {copies for pair in pairs for copies in pair.holders}:
            copies.find_shared()
        self.store.hold_idle()

    def gradient_holders(self, parameters: Iterable[nn.Parameter] | None = None) -> Iterator[nn.Parameter]:
        """The parameters whose ``.grad`` the next step uses: of all groups, or in the place of given ones."""
        for parameter in self.present() if parameters is None else parameters:
            pair = self.store.pairs.of(parameter)
            yield parameter if pair is None else pair.readable_param
