"""The swap that puts masters into an optimizer's groups while the optimizer's own code runs."""

import weakref
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ..basics.bulk import are_same, grads_of, have_grads, set_grads
from ..basics.patching import UndoStack
from ..basics.running import bucket_bytes_at_most, without_gradients
from ..distributed.sharding import shard
from ..masters.masters import IN_FLOAT32, Gradients, MasterBatch
from ..masters.states import EncodedStates, states_of
from .members import Members
from .per_parameter import StepNumbers, kept_states, steps_per_parameter

# Float32 bytes of the bucket of parameters that a step of split masters or encoded states updates at a time.
BUCKET_BYTES: Final = 64 * 2**20


@dataclass(eq=False)
class Part:
    """Some members of an optimizer that are swapped together: all have masters on one device, or all have none.

    Attributes:
        weights, inner: the members, and the parameter that replaces each while the optimizer's code runs.
        masters: the batch of their masters; None: these members have none.
        set_to: the gradients that were set on the masters; None while the masters have no gradients.
        versions: the versions of those gradients that are copies of the weights', to find writes to them; empty if none
            is a copy.
        is_read: whether the masters have values that must be rounded into the weights.
    """

    weights: list[Any]
    inner: list[Any]
    masters: MasterBatch | None
    set_to: Gradients | None = field(default=None, init=False)
    versions: Sequence[int | None] = field(default=(), init=False)
    is_read: bool = field(default=False, init=False)

    def read(self, with_gradients: bool = True) -> None:
        """Read the masters' numbers, and set their gradients to their weights'."""
        if self.masters is not None:
            self.masters.read()
            self.is_read = True
        if with_gradients:
            self.set_gradients()

    def set_gradients(self) -> None:
        """Set the masters' gradients to their weights', in float32."""
        if self.masters is not None:
            theirs = grads_of(self.weights)
            widened = self.masters.widened(theirs)
            set_grads(self.inner, widened)
            # Last: after an interruption before, masters without gradients would appear to have been cleared.
            self.set_to = widened
            if not are_same(widened, theirs):
                pairs = zip(widened, theirs, strict=True)
                self.versions = [None if mine is None or mine is its else mine._version for mine, its in pairs]

    @without_gradients
    def return_gradients(self) -> None:
        """Do to the weights' gradients what the optimizer's code did to the masters': clear, replace or write them."""
        if self.set_to is None:
            return
        present = grads_of(self.inner)
        if not are_same(present, self.set_to):
            for weight, mine, before in zip(self.weights, present, self.set_to, strict=True):
                if mine is not before:
                    weight.grad = None if mine is None else mine.to(weight.grad_dtype or weight.dtype)
        for weight, mine, before, version in zip(self.weights, present, self.set_to, self.versions, strict=False):
            was_written = version is not None and before is not None and mine is before and before._version != version
            if was_written and weight.grad is not None:
                weight.grad.copy_(before)
        self.set_to, self.versions = None, ()
        set_grads(self.inner, [None] * len(self.inner))

    def write(self) -> None:
        """Round the masters into their weights."""
        if self.is_read and self.masters is not None:
            self.masters.write()
            self.is_read = False


class Parts:
    """The division of an optimizer's members into parts.

    Attributes:
        last: the parts that the last call of :meth:`now` returned.
    """

    def __init__(self, members: Members, has_states: bool) -> None:
        self.last: list[Part] = []
        self._members = members
        self._has_states = has_states
        self._key: tuple[int, bool] = (-1, False)

    @property
    def are_stepped_one_by_one(self) -> bool:
        """Return whether a step updates a bucket of parameters at a time."""
        wants = (self._members.table.steps_in_parts and bool(self._members.masters)) or self._has_states
        return wants and steps_per_parameter(self._members.optimizer)

    def now(self) -> list[Part]:
        """Return the parts of the members that the groups have now."""
        key = (self._members.generation, self.are_stepped_one_by_one)
        if key != self._key:
            self.last = list(self._divide(key[1]))
            self._key = key
        return self.last

    def _divide(self, in_parts: bool) -> Iterator[Part]:
        members, table = self._members, self._members.table
        of_weight = {id(master.weight): master for master in members.masters}
        plain = [weight for weight in members.weights if id(weight) not in of_weight]
        for group in self._grouped(plain) if in_parts and self._has_states else [plain]:
            if group:
                yield Part(group, group, None)
        mastered: list[Any] = [master.weight for master in members.masters]
        for group in self._grouped(mastered) if in_parts or table.steps_in_parts else [mastered]:
            if group:
                masters = [of_weight[id(weight)] for weight in group]
                columns = table.batch(masters, group[0].device)
                yield Part(group, [master.parameter for master in masters], columns)

    def _grouped(self, weights: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Divide weights into buckets, in order: of one device, limited by the bytes of their float32 numbers."""
        groups: list[list[torch.Tensor]] = []
        room: dict[torch.device, tuple[list[torch.Tensor], int]] = {}
        for weight in weights:
            size = 8 * shard(weight).numel()
            group, remaining = room.get(weight.device, (None, 0))
            if group is None or remaining < size:
                group, remaining = [], bucket_bytes_at_most(weight.device, BUCKET_BYTES)
                groups.append(group)
            group.append(weight)
            room[weight.device] = group, remaining - size
        return groups


class MasterSwap:
    """The swap of masters and weights in one optimizer's groups.

    Inside :meth:`open` the groups contain masters. Inside :meth:`closed`, for a closure of the user's, they contain the
    weights again.

    Attributes:
        is_open: whether the groups contain masters now.
    """

    def __init__(self, members: Members, states: EncodedStates | None) -> None:
        self.is_open = False
        self._members = members
        self._states = states
        # True: the masters of a part are read before the part's step. False: all are read before the first part.
        self._reads_parts = members.table.steps_in_parts
        self._parts = Parts(members, states is not None)
        self._exchange = _StateExchange(members)
        self._decoded: Any = {}

    @property
    def steps_in_parts(self) -> bool:
        """Return whether a step updates a bucket of parameters at a time."""
        return self._parts.are_stepped_one_by_one

    @contextmanager
    def open(self) -> Iterator[None]:
        """Put float32 masters with their weights' gradients, and float32 states, into the groups for a block."""
        if self.is_open:
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._exit()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Put the weights, rounded from the masters, back into the groups for a block inside of :meth:`open`."""
        was_open = self.is_open
        self.close()
        try:
            yield
        finally:
            if was_open:
                self._members.values.apply_writes()
                self._enter()

    def release(self) -> None:
        """Close the scope, and free the memory of its batches."""
        self.close()
        self._parts = Parts(self._members, self._states is not None)

    def close(self) -> None:
        """Close the scope if an interruption has kept it open."""
        if self.is_open:
            self._exit()

    def _check_not_in_model(self) -> None:
        if self._members.table.are_in_model:
            raise RuntimeError(IN_FLOAT32.format(f"{type(self._members.optimizer).__name__}.step()"))

    def _enter(self) -> None:
        self._check_not_in_model()
        self._members.sync_groups()
        parts = self._parts.now()
        try:
            self.is_open = True
            for part in parts:
                part.read()
            self._members.swap_in_masters()
            self._exchange.enter()
            if self._states is not None:
                self._decoded = self._states.decode([s for _, s in self._states_of(self._members.inner)])
        except BaseException:
            self._exit()
            raise

    def _exit(self) -> None:
        undos = UndoStack()
        # These run in reverse order, each even if another raises.
        undos.push(partial(self._members.values.moved, self._members.masters))
        for part in self._parts.last:
            undos.push(part.write)
            undos.push(part.return_gradients)
        undos.push(self._close)
        if self._states is not None:
            undos.push(self._encode)
        undos.unwind()

    def _close(self) -> None:
        self._members.swap_in_weights()
        self._exchange.exit()
        self.is_open = False

    def _encode(self) -> None:
        assert self._states is not None
        decoded, self._decoded = self._decoded, {}
        kept = kept_states(self._members.optimizer)
        self._states.encode(self._states_of(self._members.inner), kept, decoded)

    def _states_of(self, parameters: Sequence[Any]) -> list[tuple[Any, dict[Any, Any]]]:
        holders = self._members.holders()
        return [(parameter, state) for parameter in parameters for state in states_of(holders, parameter)]

    @contextmanager
    def by_part(self) -> Iterator[Iterator[None]]:
        """Open the scope for a step in parts, and yield an iterator: call the optimizer's step once per iteration.

        In an iteration only the parameters of its part have gradients.
        """
        self._check_not_in_model()
        self._members.sync_groups()
        parts = self._parts.now()
        whole = [part for part in parts if part.masters is not None and not self._reads_parts]
        with UndoStack() as undos:
            undos.push(partial(self._members.values.moved, self._members.masters))
            undos.push(self._end)
            undos.push(self._members.swap_in_weights)
            undos.push(self._exchange.exit)
            self.is_open = True
            for part in whole:
                undos.push(part.write)
                part.read(with_gradients=False)
            self._members.swap_in_masters()
            self._exchange.enter()
        steps = self._steps(parts)
        try:
            yield steps
        finally:
            try:
                # After a failed step this restores its part now, and not when the generator is collected.
                steps.close()
            finally:
                undos.unwind()

    def _end(self) -> None:
        self.is_open = False

    def _steps(self, remaining: Sequence[Part]) -> Generator[None]:
        present = [part for part in remaining if have_grads(part.weights)]
        plain = [part for part in self._parts.last if part.masters is None]
        if not present:
            yield
            return
        numbers = StepNumbers(self._members.optimizer) if len(present) > 1 else None
        hidden = {id(part): grads_of(part.weights) for part in plain} if len(present) > 1 else {}
        for part in self._parts.last:
            if part.masters is not None:
                # Masters that users have are bound to gradients: the optimizer would step them with every part.
                set_grads(part.inner, [None] * len(part.inner))
        try:
            for part in plain if hidden else ():
                set_grads(part.weights, [None] * len(part.weights))
            for index, part in enumerate(present):
                if numbers is not None and index > 0:
                    numbers.restore()
                if id(part) in hidden:
                    set_grads(part.weights, hidden[id(part)])
                yield from self._step_of(part)
                if id(part) in hidden:
                    hidden[id(part)] = grads_of(part.weights)  # the optimizer may have cleared some
                    set_grads(part.weights, [None] * len(part.weights))
        finally:
            for part in plain if hidden else ():
                set_grads(part.weights, hidden[id(part)])

    def _step_of(self, part: Part) -> Generator[None]:
        try:
            if self._reads_parts:
                part.read()
            else:
                part.set_gradients()
            if self._states is None:
                yield
            else:
                with_gradient = [p for p in part.inner if p.grad is not None]
                decoded = self._states.decode([state for _, state in self._states_of(with_gradient)])
                try:
                    yield
                finally:
                    kept = kept_states(self._members.optimizer)
                    self._states.encode(self._states_of(with_gradient), kept, decoded)
        finally:
            try:
                part.return_gradients()
            finally:
                if self._reads_parts:
                    part.write()


_SHARED: Final = "state"


class _StateExchange:
    """The exchange of an optimizer's state: between steps it is keyed by weights, inside a scope by masters.

    The two dictionaries share their entries.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._holders: list[weakref.ref[Optimizer]] = []
        self._generation = -1
        # The id of the dict keyed by weights -> that dict, its keys and values at the last comparison, and the dict
        # keyed by masters.
        self._known: dict[int, tuple[Any, list[Any], list[Any], Any]] = {}
        self._inside: list[tuple[Any, Any]] = []

    def enter(self) -> None:
        """Set every holder's ``state`` to the dict keyed by masters."""
        if self._generation != self._members.generation:
            self._holders = [weakref.ref(each) for each in self._members.holders() if _SHARED in vars(each)]
            self._generation, self._known = self._members.generation, {}
        if not self._members.masters:
            return
        inner_of: dict[int, Any] = {}
        for reference in self._holders:
            holder: Any = reference()
            if holder is None:
                continue
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
        inner.update(zip(map(self._members.master_for, keys), values, strict=True))
        self._known[id(outer)] = outer, keys, values, inner
        return inner

    def exit(self) -> None:
        """Set every holder's ``state`` back to the dict that it had, with the present entries."""
        done: set[int] = set()
        while self._inside:
            holder, outer = self._inside[-1]
            inner = vars(holder)[_SHARED]
            if inner is not outer and id(outer) not in done:
                self._copy_back(outer, inner)
                done.add(id(outer))
            vars(holder)[_SHARED] = outer
            self._inside.pop()  # last, because after an interruption exit() is called again

    def _copy_back(self, outer: Any, inner: Any) -> None:
        known = self._known[id(outer)]
        if inner is known[3] and are_same(list(inner.values()), known[2]):
            return
        keys, values = list(map(self._members.weight_for, inner)), list(inner.values())
        outer.clear()
        outer.update(zip(keys, values, strict=True))
        self._known[id(outer)] = outer, keys, values, inner
