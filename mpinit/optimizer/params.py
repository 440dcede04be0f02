"""The parameters of one optimizer: weights between steps, and masters while the optimizer's own code runs."""

import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.bulk import are_same, grads_of, have_grads, set_grads
from ..basics.dtypes import is_lower_precision
from ..basics.patching import UndoStack
from ..basics.running import bucket_bytes_at_most
from ..basics.weak_references import WeakList
from ..config.plan import MasterWeightsMode, Plan
from ..distributed.sharding import shard
from ..masters.masters import IN_FLOAT32, Master, Masters
from ..masters.states import EncodedStates, states_of
from ..model.casting import convert
from ..torch_internals.fused_sgd import stepped_wrongly
from .beside_groups import exchange_beside_groups
from .gradients import Gradients
from .members import widen_state, wrapped_by
from .per_parameter import StepNumbers, is_known, kept_states, steps_per_parameter
from .swaps import Part, SwappedState

# Float32 bytes of the bucket of parameters that a step of split masters or encoded states updates at a time.
BUCKET_BYTES: Final = 64 * 2**20


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
        joined: the parameters that the groups have got since the last block.
        generation: a number that increases whenever the groups are read.
        groups_without_fused: the groups that a fused kernel would step wrongly.
        is_open: whether the groups contain masters now.
    """

    def __init__(
        self, reference: weakref.ref[Optimizer], masters: Masters, plan: Plan, states: EncodedStates | None
    ) -> None:
        self._reference = reference
        self.gradients = Gradients(plan.masters is MasterWeightsMode.FULL or plan.properties.grad_dtype is not None)
        self._kind = plan.masters
        self._states = states
        self.table = masters
        self.weights: list[nn.Parameter] = []
        self.mastered: list[nn.Parameter] = []
        self.masters: list[Master] = []
        self.joined: list[nn.Parameter] = []
        self.generation = 0
        self.groups_without_fused: list[dict[str, Any]] = []
        self.is_open = False
        # As they were read last: the groups; their lists; each list once, with its weights and what replaces them.
        self._groups: list[dict[str, Any]] = []
        self._params: list[list[Any]] = []
        self._lists: list[tuple[list[Any], list[Any], list[Any]]] = []
        self._is_alone = True
        # Frozen 16-bit weights, which get a master when they are unfrozen.
        self._frozen: list[nn.Parameter] = []
        self._of_weight: dict[int, nn.Parameter] = {}
        self._of_inner: dict[int, nn.Parameter] = {}
        # The optimizers whose other attributes may contain parameters.
        self._private: Iterable[Optimizer] = ()
        self._parts: tuple[tuple[int, bool], list[Part]] = (-1, False), []
        # Whether all optimizers step as a class of torch does, which never touches the gradients that it reads.
        self._are_known = False
        # For the id of each state: itself and the state under the masters, which has the same entries.
        self._inner_states: dict[int, SwappedState] = {}
        self._exchanged: list[tuple[Any, SwappedState]] = []
        self._decoded: Any = {}

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        optimizer = self._reference()
        assert optimizer is not None, "an optimizer that was freed is in no list"
        return optimizer

    def holders(self) -> list[Optimizer]:
        """List the optimizers that keep state for the parameters: this one and those that it wraps."""
        optimizer = self.optimizer
        return [optimizer, *wrapped_by(optimizer)]

    # -- the groups -----------------------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """List the weights that are in the groups now, each once; changes nothing."""
        if self.are_as_seen():
            return self.weights
        return list({id(p): p for group in self._groups_of(self.holders()) for p in group["params"]}.values())

    def sync(self) -> None:
        """Read the groups again if they have changed, and make masters of weights that were unfrozen."""
        if self.is_open or self.table.are_in_model:
            return  # the groups contain masters, or the parameters of a float32_weights block
        if not self.are_as_seen() or (self._frozen and any([weight.requires_grad for weight in self._frozen])):  # noqa: C419
            self._read()

    def are_as_seen(self) -> bool:
        """Return whether the groups contain the same parameters as when they were read last."""
        groups = self.optimizer.param_groups if self._is_alone else self._groups_of(self.holders())
        if self.generation == 0 or not are_same(groups, self._groups):
            return False
        for group, params in zip(groups, self._params, strict=True):
            if group["params"] is not params:
                return False
        return all([are_same(each, inner if self.is_open else weights) for each, weights, inner in self._lists])  # noqa: C419

    @staticmethod
    def _groups_of(holders: Sequence[Optimizer]) -> list[dict[str, Any]]:
        return [group for each in holders for group in each.param_groups]

    def _read(self) -> None:
        holders = self.holders()
        self._groups, self._is_alone = self._groups_of(holders), len(holders) == 1
        self._params = [group["params"] for group in self._groups]
        lists = list({id(params): params for params in self._params}.values())
        weights = list({id(p): p for params in lists for p in params}.values())
        found = [self.table.of(weight) or self._make_master(weight, holders) for weight in weights]
        known = set(map(id, self.weights))
        self.joined += [weight for weight in weights if id(weight) not in known]
        before, now = self.masters, [master for master in found if master is not None]
        for master in now:
            master.optimizers += 1
        for master in before:
            master.optimizers -= 1
        self.weights[:], self.mastered[:], self.masters = weights, [master.weight for master in now], now
        is_full = self._kind is MasterWeightsMode.FULL
        self.gradients.set_weights(
            self.weights, self.mastered, [master.parameter if is_full else master.weight for master in now]
        )
        self._of_weight = {id(master.weight): master.parameter for master in now}
        self._of_inner = {id(master.parameter): master.weight for master in now}
        self._lists = [(each, list(each), [self._of_weight.get(id(p), p) for p in each]) for each in lists]
        self._are_known = all(map(is_known, holders))
        self._private = WeakList(holders) if now and not self._are_known else ()
        self._inner_states.clear()
        self._frozen = [
            weight
            for weight, master in zip(weights, found, strict=True)
            if master is None and not weight.requires_grad and is_lower_precision(weight.dtype)
        ]
        as_stepped: dict[torch.Tensor, torch.dtype] = {master.weight: torch.float32 for master in now}
        self.groups_without_fused = stepped_wrongly(holders, self._groups, as_stepped)
        self.table.discard_unused(before)
        self.generation += 1

    def _make_master(self, weight: nn.Parameter, holders: Sequence[Optimizer]) -> Master | None:
        """Make the master of a trainable 16-bit weight, whose state becomes float32 with it."""
        if self._kind is MasterWeightsMode.NONE or not (weight.requires_grad and is_lower_precision(weight.dtype)):
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
        self._open()
        try:
            yield
        finally:
            self.close()

    @contextmanager
    def weights_in_groups(self) -> Iterator[None]:
        """Put the weights, rounded from the masters, back for a block inside of :meth:`masters_in_groups`."""
        was_open = self.is_open
        self.close()
        try:
            yield
        finally:
            if was_open:
                self.table.apply_writes()
                self._open()

    @contextmanager
    def masters_in_groups_for_load(self) -> Iterator[None]:
        """Put masters into the groups for ``load_state_dict``, which casts state to the dtype of what is there.

        For frozen 16-bit weights, which have no masters yet, there are float32 parameters without memory: the state
        that such a weight is stepped with when it is unfrozen has every bit that was loaded.
        """
        self.sync()
        frozen = self._frozen if self._kind in (MasterWeightsMode.FULL, MasterWeightsMode.SPLIT) else ()
        others = {id(weight): _without_memory(weight) for weight in frozen if not weight.is_sparse}
        back = {id(other): weight for weight in frozen if (other := others.get(id(weight))) is not None}
        try:
            self._of_weight.update(others)
            self._of_inner.update(back)
            for _, weights, inner in self._lists if others else ():
                inner[:] = [self._of_weight.get(id(weight), weight) for weight in weights]
            with self.masters_in_groups():
                yield
        finally:
            self._inner_states.clear()
            for key in others:
                self._of_weight.pop(key, None)
            for key in back:
                self._of_inner.pop(key, None)
            for _, weights, inner in self._lists if others else ():
                inner[:] = [self._of_weight.get(id(weight), weight) for weight in weights]

    def _open(self) -> None:
        self._check_not_in_model()
        self.sync()
        try:
            self.is_open = True
            for part in self._present_parts():
                part.read()
                try:
                    part.set_gradients()
                except RuntimeError:  # a master takes no 16-bit gradient, as of a plain backward pass
                    self.gradients.widen()
                    part.set_gradients()
            self._swap_in_masters()
            if self._states is not None:
                self._decoded = self._states.decode([state for _, state in self._states_of(self._stepped())])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Put the weights back into the groups; nothing if they are there."""
        if not self.is_open:
            return
        undos = UndoStack()
        # These run in reverse order, each even if another raises.
        for part in self._parts[1]:
            undos.push(part.write)
            undos.push(partial(part.return_gradients, self._are_known))
        undos.push(self._end)
        if self._states is not None:
            undos.push(self._encode)
        undos.unwind()

    def _end(self) -> None:
        self._swap_in_weights()
        self.is_open = False

    def _check_not_in_model(self) -> None:
        if self.table.are_in_model:
            raise RuntimeError(IN_FLOAT32.format(f"{type(self.optimizer).__name__}.step()"))

    def release(self) -> None:
        """Free the memory of buckets; the session ends."""
        self.close()
        self._parts = (-1, False), []
        self._inner_states.clear()

    def _swap_in_masters(self) -> None:
        for each, _, inner in self._lists:
            each[:] = inner
        for holder in self._private:
            exchange_beside_groups(holder, self._of_weight)
        if not self._of_weight:
            return
        for holder in (self.optimizer,) if self._is_alone else self.holders():
            if "state" not in vars(holder):
                continue  # it shows the state of the optimizer that it wraps
            outer: Any = holder.state
            swapped = self._inner_states.get(id(outer))
            if swapped is None or not swapped.is_as_seen(outer):
                swapped = self._inner_states[id(outer)] = SwappedState(outer, self._of_weight)
            self._exchanged.append((holder, swapped))
            vars(holder)["state"] = swapped.inner

    def _swap_in_weights(self) -> None:
        """Replace masters by weights, also in groups and states that the optimizer's code has made or replaced."""
        for each, weights, inner in self._lists:
            each[:] = weights if are_same(each, inner) else [self._of_inner.get(id(p), p) for p in each]
        groups = self.optimizer.param_groups if self._is_alone else self._groups_of(self.holders())
        params = [group["params"] for group in groups]
        for each in () if are_same(params, self._params) else params:
            each[:] = [self._of_inner.get(id(p), p) for p in each]
        for holder in self._private:
            exchange_beside_groups(holder, self._of_inner)
        while self._exchanged:
            holder, swapped = self._exchanged[-1]
            swapped.bring_back(vars(holder)["state"], self._of_inner)
            vars(holder)["state"] = swapped.outer
            self._exchanged.pop()  # last, because after an interruption this runs again

    # -- in parts ---------------------------------------------------------------------------------------------------

    @property
    def steps_in_parts(self) -> bool:
        """Return whether a step updates a bucket of parameters at a time, because its float32 numbers are temporary."""
        wants = (self._kind is MasterWeightsMode.SPLIT and bool(self.masters)) or self._states is not None
        return wants and steps_per_parameter(self.optimizer)

    @contextmanager
    def parts_in_groups(self) -> Iterator[Iterator[None]]:
        """Put masters into the groups, and yield an iterator: the optimizer's step is to be called in each iteration.

        In an iteration only the parameters of one part have gradients.
        """
        self._check_not_in_model()
        self.sync()
        if self.gradients.widens:
            self.gradients.widen()
        parts = self._present_parts()
        # Full masters are read before the first part, and split ones part by part.
        whole = [part for part in parts if part.batch is not None and self._kind is MasterWeightsMode.FULL]
        with UndoStack() as undos:
            undos.push(self._end)
            self.is_open = True
            for part in whole:
                undos.push(part.write)
                part.read()
            self._swap_in_masters()
        steps = self._steps(parts)
        try:
            yield steps
        finally:
            try:
                # After a failed step this restores its part now, and not when the generator is collected.
                steps.close()
            finally:
                undos.unwind()

    def _steps(self, parts: Sequence[Part]) -> Generator[None]:
        present = [part for part in parts if have_grads(part.weights)]
        if not present:
            yield
            return
        numbers = StepNumbers(self.optimizer) if len(present) > 1 else None
        # Gradients of weights without masters are taken away while other parts are stepped.
        plain = [part for part in parts if part.batch is None] if len(present) > 1 else []
        taken = {id(part): grads_of(part.weights) for part in plain}
        for part in parts:
            if part.batch is not None:
                set_grads(part.inner, [None] * len(part.inner))  # a user may have the masters, with gradients
        try:
            for part in plain:
                set_grads(part.weights, [None] * len(part.weights))
            for index, part in enumerate(present):
                if numbers is not None and index > 0:
                    numbers.restore()
                if id(part) in taken:
                    set_grads(part.weights, taken[id(part)])
                yield from self._step_of(part)
                if id(part) in taken:
                    taken[id(part)] = grads_of(part.weights)  # the optimizer may have cleared some
                    set_grads(part.weights, [None] * len(part.weights))
        finally:
            for part in plain:
                set_grads(part.weights, taken[id(part)])

    def _step_of(self, part: Part) -> Generator[None]:
        reads = self._kind is MasterWeightsMode.SPLIT
        try:
            if reads:
                part.read()
            part.set_gradients()
            if self._states is None:
                yield
                return
            with_gradient = [p for p in part.inner if p.grad is not None]
            decoded = self._states.decode([state for _, state in self._states_of(with_gradient)])
            try:
                yield
            finally:
                self._states.encode(self._states_of(with_gradient), kept_states(self.optimizer), decoded)
        finally:
            try:
                part.return_gradients()
            finally:
                if reads:
                    part.write()

    def _present_parts(self) -> list[Part]:
        key = (self.generation, self.steps_in_parts)
        if key != self._parts[0]:
            self._parts = key, list(self._divide(key[1]))
        return self._parts[1]

    def _divide(self, in_parts: bool) -> Iterator[Part]:
        of_weight = {id(master.weight): master for master in self.masters}
        plain = [weight for weight in self.weights if id(weight) not in of_weight]
        for group in self._in_buckets(plain) if in_parts and self._states is not None else [plain]:
            if group:
                yield Part(group, group, None)
        is_split = self._kind is MasterWeightsMode.SPLIT
        for group in self._in_buckets(self.mastered) if in_parts or is_split else [self.mastered]:
            if group:
                masters = [of_weight[id(weight)] for weight in group]
                batch = self.table.batch(masters, group[0].device)
                yield Part(list(group), [master.parameter for master in masters], batch)

    def _in_buckets(self, weights: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Divide weights into buckets: of one device, limited by the bytes of their float32 numbers.

        Weights of odd sizes are last: compiled functions take neighbours in pairs.
        """
        buckets: list[list[nn.Parameter]] = []
        room: dict[torch.device, tuple[list[nn.Parameter], int]] = {}
        for weight in sorted(weights, key=lambda each: shard(each).numel() % 2):
            size = 8 * shard(weight).numel()
            bucket, remaining = room.get(weight.device, (None, 0))
            if bucket is None or remaining < size:
                bucket, remaining = [], bucket_bytes_at_most(weight.device, BUCKET_BYTES)
                buckets.append(bucket)
            bucket.append(weight)
            room[weight.device] = bucket, remaining - size
        return buckets

    # -- encoded states ---------------------------------------------------------------------------------------------

    def _stepped(self) -> list[nn.Parameter]:
        return [self._of_weight.get(id(weight), weight) for weight in self.weights]

    def _states_of(self, parameters: Sequence[Any]) -> list[tuple[Any, dict[Any, Any]]]:
        holders = self.holders()
        return [(parameter, state) for parameter in parameters for state in states_of(holders, parameter)]

    def _encode(self) -> None:
        assert self._states is not None
        decoded, self._decoded = self._decoded, {}
        self._states.encode(self._states_of(self._stepped()), kept_states(self.optimizer), decoded)


def _without_memory(weight: nn.Parameter) -> nn.Parameter:
    """Return a float32 parameter of the weight's shape and device with the memory of one number."""
    number = torch.zeros((), dtype=torch.float32, device=weight.device)
    return nn.Parameter(number.expand(weight.shape), requires_grad=False)


class Snapshot:
    """The float32 numbers of an optimizer's parameters, to restore them if a step with a closure is skipped."""

    def __init__(self, params: OptimizerParams) -> None:
        self._table = params.table
        self._masters = [(master, params.table.values(master).clone()) for master in params.masters]
        own = set(map(id, params.mastered))
        self._plain = [(weight, weight.detach().clone()) for weight in params.weights if id(weight) not in own]

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, values in self._plain:
            parameter.copy_(values)
        for master, values in self._masters:
            self._table.load(master, values)
