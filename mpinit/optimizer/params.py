"""The parameters of one optimizer: weights between steps, and masters while the optimizer's own code runs."""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.bulk import have_grads
from ..basics.dtypes import is_lower_precision
from ..basics.patching import UndoStack
from ..config.plan import MasterWeightsMode, Plan
from ..masters.masters import Master, Masters
from ..masters.states import Decoded, EncodedStates, states_of
from ..model.casting import convert
from ..torch_internals.parameter_data import is_watched
from .gradients import Gradients
from .groups import Groups
from .members import widen_state
from .parts import Part, in_buckets
from .per_parameter import StepNumbers, is_known, steps_per_parameter

_generations: Final = itertools.count(1)
_FOREIGN: Final = (
    "a weight of shape {1} was added to this {0}, and it has a float32 master in another session: pass both models and "
    "their optimizers in one call of mpinit.initialize, or make an optimizer for the weights of each"
)


class OptimizerParams:
    """The parameters in the groups of an optimizer, and of the optimizers that it wraps, each once.

    Between steps the groups contain the model's weights. Inside :meth:`masters_in_groups` they contain the masters,
    with float32 gradients and states, and inside of that :meth:`weights_in_groups` puts the weights back for a closure.
    Groups are read again when a step or a block begins: entries may have been replaced, added, frozen or unfrozen.

    Attributes:
        weights: the parameters in the groups between steps. The list is always the same object.
        mastered: those of them that have masters; always the same object, too.
        masters: their masters.
        table: the masters of the session.
        gradients: the weights' gradients.
        groups: the groups.
        joined: the parameters that the groups have got since the last block.
        generation: a number of its own for each time that groups are read, of any optimizer; 0 before the first.
    """

    def __init__(self, optimizer: Optimizer, masters: Masters, plan: Plan, states: EncodedStates | None) -> None:
        self.table = masters
        self.gradients = Gradients(plan.masters is MasterWeightsMode.FULL or plan.properties.grad_dtype is not None)
        self.groups = Groups(weakref.ref(optimizer))
        self.weights: list[nn.Parameter] = []
        self.mastered: list[nn.Parameter] = []
        self.masters: list[Master] = []
        self.joined: list[nn.Parameter] = []
        self.generation = 0
        masters.users.add(self)
        self._kind = plan.masters
        self._states = states
        # A step of one of torch's classes touches no gradients. Another may also be known to update each parameter by
        # itself, so that its step may be divided, because its float32 numbers are temporary.
        self._is_known = is_known(optimizer)
        are_temporary = plan.masters is MasterWeightsMode.SPLIT or states is not None
        self._divides = are_temporary and steps_per_parameter(optimizer)
        # Frozen 16-bit weights, which get a master when they are unfrozen.
        self._frozen: list[nn.Parameter] = []
        # The generation for which the weights were divided, and their parts; those of them that are open now, with the
        # parameters whose states are decoded, and the codes of these.
        self._parts: tuple[int, list[Part]] = -1, []
        self._opened: Sequence[Part] = ()
        self._decoded: list[nn.Parameter] = []
        self._codes = Decoded()

    @property
    def is_open(self) -> bool:
        """Whether the groups contain masters now."""
        return self.groups.are_replaced

    def parameters(self) -> list[nn.Parameter]:
        """List the weights that are in the groups now, each once; changes nothing."""
        return self.weights if self.generation and self.groups.are_as_seen() else self.groups.parameters()

    def sync(self) -> None:
        """Read the groups again if they have changed, and make masters of weights that were unfrozen."""
        if self.is_open:
            return
        is_unfrozen = self._frozen and any([weight.requires_grad for weight in self._frozen])  # noqa: C419
        if is_unfrozen or not self.generation or not self.groups.are_as_seen():
            self._read()

    def _read(self) -> None:
        self.groups.read()
        holders, weights = self.groups.holders(), self.groups.parameters()
        found = [self.table.of(weight) or self._make_master(weight, holders) for weight in weights]
        known = set(map(id, self.weights))
        self.joined += [weight for weight in weights if id(weight) not in known]
        before, now = self.masters, [master for master in found if master is not None]
        self.weights[:], self.mastered[:], self.masters = weights, [master.weight for master in now], now
        is_full = self._kind is MasterWeightsMode.FULL
        self.gradients.set_weights(
            self.weights, self.mastered, [master.parameter if is_full else master.weight for master in now]
        )
        self._replace_by(now)
        self._frozen = [
            weight
            for weight, master in zip(weights, found, strict=True)
            if master is None and not weight.requires_grad and is_lower_precision(weight.dtype)
        ]
        # A master goes with its weight, when that is in no optimizer and in no model any more.
        used = {id(master) for user in self.table.users for master in user.masters} if before else set()
        unused = [master for master in before if id(master) not in used]
        in_models = {id(p) for model in self.table.names.models for p in model.parameters()} if unused else ()
        for master in unused:
            if id(master.weight) not in in_models:
                self.table.discard(master)
        self.generation = next(_generations)

    def _replace_by(self, masters: Sequence[Master], others: Sequence[tuple[nn.Parameter, nn.Parameter]] = ()) -> None:
        pairs = [(master.weight, master.parameter) for master in masters]
        self.groups.replace_by([*pairs, *others], is_private=not self._is_known)

    def _make_master(self, weight: nn.Parameter, holders: Sequence[Optimizer]) -> Master | None:
        """Make the master of a trainable 16-bit weight, whose state becomes float32 with it."""
        if not (weight.requires_grad and is_lower_precision(weight.dtype)):
            return None
        if is_watched(weight):
            raise RuntimeError(_FOREIGN.format(type(holders[0]).__name__, tuple(weight.shape)))
        if self._kind is MasterWeightsMode.NONE:
            return None
        if self._kind is MasterWeightsMode.IN_MODEL:
            convert(weight, torch.float32)
            master = None
        else:
            master = self.table.add(weight, weight.dtype)
            if master is not None:
                self.table.cast([master])
        for holder in holders:
            widen_state(holder.state.get(weight))
        return master

    # -- masters in the groups ------------------------------------------------------------------------------------

    @contextmanager
    def masters_in_groups(self) -> Iterator[None]:
        """Put masters into the groups, with their weights' gradients in float32 and float32 states, for a block.

        At the end, also after an error, the masters are rounded into the weights.
        """
        if self.is_open:
            yield
            return
        try:
            self._open()
            yield
        finally:
            self.close()

    @contextmanager
    def weights_in_groups(self) -> Iterator[None]:
        """Put the weights, rounded from the masters, back for a block inside of :meth:`masters_in_groups`."""
        self.close()
        try:
            yield
        finally:
            self.table.follow_writes()
            self._open()

    @contextmanager
    def masters_in_groups_for_load(self) -> Iterator[None]:
        """Put masters into the groups for ``load_state_dict``, which casts state to the dtype of what is there.

        For frozen 16-bit weights, which have no masters yet, there are float32 parameters without memory: the state
        that such a weight is stepped with when it is unfrozen has every bit that was loaded.
        """
        self.sync()
        has_masters = self._kind in (MasterWeightsMode.FULL, MasterWeightsMode.SPLIT)
        self._replace_by(self.masters, [(each, _without_memory(each)) for each in self._frozen if has_masters])
        try:
            with self.masters_in_groups():
                yield
        finally:
            self._replace_by(self.masters)

    def run(self, step: Callable[[], Any]) -> Any:
        """Run the optimizer's own step with masters in the groups, or several times, each for a part of them.

        While it runs for a part, no other parameters have gradients.
        """
        if self.is_open or not self._divides:
            with self.masters_in_groups():
                return step()
        parts = self._present_parts()
        with_gradients = [part for part in parts if have_grads(part.weights)] or [Part([], [])]
        numbers = StepNumbers(self.groups.optimizer) if len(with_gradients) > 1 else None
        result, undos = None, UndoStack()
        try:
            undos.push(self.groups.put_back)
            self.groups.replace()
            for part in parts:
                if part.batch is None:
                    undos.push(part.show_gradients)
                    part.hide_gradients()
            for index, part in enumerate(with_gradients):
                if numbers is not None and index > 0:
                    numbers.restore()
                try:
                    self._open_parts([part])
                    result = step()
                finally:
                    self._close_parts()
        finally:
            undos.unwind()
        return result

    def _open(self) -> None:
        parts = self._present_parts()
        self.groups.replace()
        self._open_parts(parts, with_all_states=True)

    def _open_parts(self, parts: Sequence[Part], with_all_states: bool = False) -> None:
        """Give parameters their float32 numbers: values, gradients and states."""
        self._opened = parts
        for part in parts:
            part.read()
            try:
                part.set_gradients()
            except RuntimeError:  # a master takes no 16-bit gradient, as of a plain backward pass
                self.gradients.widen()
                part.set_gradients()
        if self._states is not None:
            stepped = [p for part in parts for p in part.inner if with_all_states or p.grad is not None]
            self._decoded = stepped
            self._codes = self._states.decode([state for _, state in self._states_of(stepped)])

    def _close_parts(self) -> None:
        """Reverse :meth:`_open_parts`, each part even if another raises."""
        undos = UndoStack()
        for part in self._opened:
            undos.push(part.write)
            undos.push(partial(part.return_gradients, self._is_known))
        if self._states is not None:
            undos.push(self._encode)
        undos.unwind()

    def _encode(self) -> None:
        assert self._states is not None
        stepped, codes = self._decoded, self._codes
        self._decoded, self._codes = [], Decoded()
        self._states.encode(self._states_of(stepped), codes)

    def _states_of(self, parameters: Sequence[Any]) -> list[tuple[Any, dict[Any, Any]]]:
        holders = self.groups.holders()
        return [(parameter, state) for parameter in parameters for state in states_of(holders, parameter)]

    def close(self) -> None:
        """Put the weights back into the groups; nothing if they are there."""
        if self.is_open:
            undos = UndoStack()
            undos.push(self.groups.put_back)
            undos.push(self._close_parts)
            undos.unwind()

    def release(self) -> None:
        """Free the memory of buckets; the session ends."""
        self.close()
        self._parts, self._opened = (-1, []), ()
        self.groups.forget_states()

    @contextmanager
    def only(self, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        """Let steps in a block read and round the masters of some weights only; no others have gradients."""
        kept, self._parts = self._parts, (self.generation, self._in_parts(weights))
        try:
            yield
        finally:
            self._parts = kept

    def _present_parts(self) -> list[Part]:
        """List the parts of the weights: several where they are stepped one by one, and of split masters."""
        self.sync()
        if self._parts[0] != self.generation:
            self._parts = self.generation, self._in_parts(self.weights)
        return self._parts[1]

    def _in_parts(self, weights: Sequence[nn.Parameter]) -> list[Part]:
        of_weight = {id(master.weight): master for master in self.masters}
        plain = [weight for weight in weights if id(weight) not in of_weight]
        are_plain_divided = self._divides and self._states is not None
        parts = [Part(own, own) for own in (in_buckets(plain) if are_plain_divided else [plain]) if own]
        mastered = [weight for weight in weights if id(weight) in of_weight]
        are_divided = self._divides or self._kind is MasterWeightsMode.SPLIT
        for own in in_buckets(mastered) if are_divided else [mastered]:
            masters = [of_weight[id(weight)] for weight in own]
            if masters:
                batch = self.table.batch(masters, own[0].device)
                parts.append(Part(list(own), [master.parameter for master in masters], batch))
        return parts


def _without_memory(weight: nn.Parameter) -> nn.Parameter:
    """Return a float32 parameter of the weight's shape and device with the memory of one number."""
    number = torch.zeros((), dtype=torch.float32, device=weight.device)
    return nn.Parameter(number.expand(weight.shape), requires_grad=False)
