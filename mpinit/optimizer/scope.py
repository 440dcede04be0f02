"""Masters in an optimizer's groups while its own code runs, and only then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from ..basics.patching import UndoStack
from ..distributed.sharding import shard
from ..masters.masters import Gradients, Master, OpenMasters
from ..masters.states import EncodedStates, states_of
from ..torch_internals.columns import are_same, grads_of, set_grads
from ..torch_internals.devices import bucket_bytes_at_most
from .members import Members
from .per_parameter import StepNumbers, kept_states, steps_per_parameter


@dataclass(eq=False)
class _Part:
    """Members of one optimizer that are in float32 together: with masters of one device, or without any.

    Attributes:
        weights, inner: the members, and what stands for each inside.
        masters: their columns; None: these members have none.
        given: the gradients that the masters were given, while they have them.
        is_read: whether the masters hold numbers that are to be rounded into the weights.
    """

    weights: list[Any]
    inner: list[Any]
    masters: OpenMasters | None
    given: Gradients | None = None
    is_read: bool = False

    def read(self, with_gradients: bool = True) -> None:
        """Masters get their numbers, and the gradients of their weights."""
        if self.masters is not None:
            self.masters.read()
            self.is_read = True
        if with_gradients:
            self.give_gradients()

    def give_gradients(self) -> None:
        """Masters get the gradients of their weights, in float32."""
        if self.masters is not None:
            self.given = self.masters.widened(grads_of(self.weights))
            set_grads(self.inner, self.given)

    def take_gradients(self) -> None:
        """Weights get what the optimizer's code has made of their gradients: some may be cleared or replaced."""
        if self.given is None:
            return
        left = grads_of(self.inner)
        if not are_same(left, self.given):
            for weight, mine, given in zip(self.weights, left, self.given, strict=True):
                if mine is not given:
                    weight.grad = None if mine is None else mine.to(weight.grad_dtype or weight.dtype)
        set_grads(self.inner, repeat(None))
        self.given = None

    def write(self) -> None:
        """Masters are rounded into their weights."""
        if self.is_read and self.masters is not None:
            self.masters.write()
            self.is_read = False


@final
class Scope:
    """One optimizer's masters: :meth:`open` puts them into its groups, :meth:`closed` takes them out for a closure.

    Args:
        members: the optimizer's parameters.
        states: how its state is kept; None: in float32, as it is.
        bucket_bytes: float32 bytes at a time where a step is done in parts.

    Attributes:
        is_open: whether the groups hold masters at the moment.
    """

    def __init__(self, members: Members, states: EncodedStates | None, bucket_bytes: int) -> None:
        self.is_open = False
        self._members = members
        self._states = states
        self._bucket_bytes = bucket_bytes
        self._key: tuple[int, bool] = (-1, False)
        self._parts: list[_Part] = []
        self._exchange = _StateExchange(members)
        self._taken: Any = {}

    @property
    def steps_in_parts(self) -> bool:
        """Whether a step is done a few parameters at a time."""
        wants = (self._members.table.steps_in_parts and bool(self._members.masters)) or self._states is not None
        return wants and steps_per_parameter(self._members.optimizer)

    # -- as a whole -----------------------------------------------------------------------------------------------

    @contextmanager
    def open(self) -> Iterator[None]:
        """While the block runs the groups hold float32 masters, with their weights' gradients, and float32 states."""
        if self.is_open:
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """In the middle of :meth:`open`: the groups hold the weights again, which are what the masters are by now."""
        self._leave()
        try:
            yield
        finally:
            self._enter()

    def _enter(self) -> None:
        self._members.refresh()
        parts = self._divided()
        with UndoStack() as undos:
            undos.push(self._leave)
            self.is_open = True
            for part in parts:
                part.read()
            self._members.show_masters()
            self._exchange.enter()
            if self._states is not None:
                self._taken = self._states.decode([s for _, s in self._states_of(self._members.inner)])

    def _leave(self) -> None:
        with UndoStack() as undos:
            # Run in reverse order, each even where another raises.
            for part in self._parts:
                undos.push(part.write)
                undos.push(part.take_gradients)
            undos.push(self._close)
            if self._states is not None:
                undos.push(self._encode)
        undos.unwind()

    def _close(self) -> None:
        self._members.show_weights()
        self._exchange.leave()
        self.is_open = False

    def _encode(self) -> None:
        assert self._states is not None
        taken, self._taken = self._taken, {}
        kept = kept_states(self._members.optimizer)
        self._states.encode(self._states_of(self._members.inner), kept, taken)

    def _states_of(self, parameters: Sequence[Any]) -> list[tuple[Any, dict[Any, Any]]]:
        holders = self._members.holders()
        return [(parameter, state) for parameter in parameters for state in states_of(holders, parameter)]

    # -- in parts -------------------------------------------------------------------------------------------------

    @contextmanager
    def in_parts(self) -> Iterator[Iterator[None]]:
        """:meth:`open` for a step: iterate over the inside, one step of the optimizer's an iteration.

        Each iteration sees the gradients of its own part alone. An optimizer that does not update each parameter by
        itself gets one part.
        """
        if not self.steps_in_parts:
            with self.open():
                yield iter((None,))
            return
        self._members.refresh()
        parts = self._divided()
        whole = [part for part in parts if part.masters is not None and not self._members.table.steps_in_parts]
        with UndoStack() as undos:
            undos.push(self._end)
            undos.push(self._members.show_weights)
            undos.push(self._exchange.leave)
            self.is_open = True
            for part in whole:
                undos.push(part.write)
                part.read(with_gradients=False)
            self._members.show_masters()
            self._exchange.enter()
        steps = self._steps(parts)
        try:
            yield steps
        finally:
            try:
                # After a failed step the part at hand is put back here, and not whenever it is collected.
                steps.close()
            finally:
                undos.unwind()

    def _end(self) -> None:
        self.is_open = False

    def _steps(self, parts: Sequence[_Part]) -> Generator[None]:
        present = [part for part in parts if any(grad is not None for grad in grads_of(part.weights))]
        plain = [part for part in parts if part.masters is None]
        if not present:
            yield
            return
        numbers = StepNumbers(self._members.optimizer) if len(present) > 1 else None
        hidden = {id(part): grads_of(part.weights) for part in plain} if len(present) > 1 else {}
        try:
            for part in plain if hidden else ():
                set_grads(part.weights, [None] * len(part.weights))
            for index, part in enumerate(present):
                if numbers is not None and index > 0:
                    numbers.put_back()
                if id(part) in hidden:
                    set_grads(part.weights, hidden[id(part)])
                yield from self._step_of(part)
                if id(part) in hidden:
                    hidden[id(part)] = grads_of(part.weights)  # the optimizer may have cleared some
                    set_grads(part.weights, [None] * len(part.weights))
        finally:
            for part in plain if hidden else ():
                set_grads(part.weights, hidden[id(part)])

    def _step_of(self, part: _Part) -> Generator[None]:
        in_parts = self._members.table.steps_in_parts
        try:
            if in_parts:
                part.read()
            else:
                part.give_gradients()
            if self._states is None:
                yield
            else:
                with_gradient = [p for p in part.inner if p.grad is not None]
                taken = self._states.decode([state for _, state in self._states_of(with_gradient)])
                try:
                    yield
                finally:
                    kept = kept_states(self._members.optimizer)
                    self._states.encode(self._states_of(with_gradient), kept, taken)
        finally:
            try:
                part.take_gradients()
            finally:
                if in_parts:
                    part.write()

    def _divided(self) -> list[_Part]:
        """The members in parts, as the groups are now."""
        key = (self._members.generation, self.steps_in_parts)
        if key != self._key:
            self._parts = list(self._divide(key[1]))
            self._key = key
        return self._parts

    def _divide(self, in_parts: bool) -> Iterator[_Part]:
        members, table = self._members, self._members.table
        of_weight = {id(master.weight): master for master in members.masters}
        plain = [weight for weight in members.weights if id(weight) not in of_weight]
        alone = in_parts and self._states is not None
        for group in self._grouped(plain) if alone else [plain]:
            if group:
                yield _Part(group, group, None)
        mastered: list[Any] = [master.weight for master in members.masters]
        for group in self._grouped(mastered) if in_parts or table.steps_in_parts else [mastered]:
            if group:
                masters = [of_weight[id(weight)] for weight in group]
                columns = table.opened(masters, group[0].device)
                yield _Part(group, _parameters(masters), columns)

    def _grouped(self, weights: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """By device, in order, as many together as the float32 bytes allow for, at least one."""
        groups: list[list[torch.Tensor]] = []
        room: dict[torch.device, tuple[list[torch.Tensor], int]] = {}
        for weight in weights:
            size = 8 * shard(weight).numel()
            group, left = room.get(weight.device, (None, 0))
            if group is None or left < size:
                group, left = [], bucket_bytes_at_most(weight.device, self._bucket_bytes)
                groups.append(group)
            group.append(weight)
            room[weight.device] = group, left - size
        return groups


def _parameters(masters: Sequence[Master]) -> list[Any]:
    return [master.parameter for master in masters]


_SHARED: Final = "state"


@final
class _StateExchange:
    """An optimizer's state, keyed by weights between steps and by masters inside: two dicts of the same entries."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._holders: list[Optimizer] = []
        self._generation = -1
        # By the id of the outer dict: it, its keys and values when they were last compared, and the inner dict.
        self._known: dict[int, tuple[Any, list[Any], list[Any], Any]] = {}
        self._inside: list[tuple[Any, Any]] = []

    def enter(self) -> None:
        """Every holder's ``state`` becomes the one keyed by masters."""
        if self._generation != self._members.generation:
            self._holders = [each for each in self._members.holders() if _SHARED in vars(each)]
            self._generation, self._known = self._members.generation, {}
        if not self._members.masters:
            return
        inner_of: dict[int, Any] = {}
        for holder in self._holders:
            outer = holder.state
            if id(outer) not in inner_of:
                inner_of[id(outer)] = self._inner(outer)
            self._inside.append((holder, outer))
            vars(holder)[_SHARED] = inner_of[id(outer)]

    def _inner(self, outer: Any) -> Any:
        known = self._known.get(id(outer))
        keys, values = list(outer), list(outer.values())
        if known is not None and known[0] is outer and are_same(keys, known[1]) and are_same(values, known[2]):
            return known[3]
        inner = defaultdict(outer.default_factory) if isinstance(outer, defaultdict) else type(outer)()
        inner.update(zip(map(self._members.inside, keys), values, strict=True))
        self._known[id(outer)] = outer, keys, values, inner
        return inner

    def leave(self) -> None:
        """Every holder gets the dict it had, with what its code has made of the entries."""
        done: set[int] = set()
        while self._inside:
            holder, outer = self._inside.pop()
            inner = vars(holder)[_SHARED]
            if id(outer) not in done:
                done.add(id(outer))
                self._take(outer, inner)
            vars(holder)[_SHARED] = outer

    def _take(self, outer: Any, inner: Any) -> None:
        known = self._known[id(outer)]
        if inner is known[3] and are_same(list(inner.values()), known[2]):
            return
        keys, values = list(map(self._members.outside, inner)), list(inner.values())
        outer.clear()
        outer.update(zip(keys, values, strict=True))
        self._known[id(outer)] = outer, keys, values, inner
