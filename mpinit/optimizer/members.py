"""The parameters of one optimizer, their masters, and every list in which the two are swapped."""

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from ..basics.bulk import are_same, exchanged
from ..basics.dtypes import is_lower_precision
from ..basics.weak_references import WeakList
from ..config.plan import MasterWeightsMode
from ..masters.masters import Master
from ..model.casting import convert
from ..model.float32_values import Float32Values
from ..torch_internals.fused_sgd import stepped_wrongly
from .per_parameter import is_known
from .state import cast_state, wrapped_by

# Attributes of torch, which are handled separately.
_KNOWN: Final = frozenset({"param_groups", "state", "defaults"})
_DEEPEST: Final = 4
_DICTS: Final = (dict, defaultdict, OrderedDict)
_CONTAINERS: Final = (*_DICTS, list, tuple, set, frozenset)


class Members:
    """The parameters in the groups of an optimizer, and of the optimizers that it wraps, each once.

    The groups are read again when a step begins: entries may have been replaced, removed, added, frozen or unfrozen.

    Attributes:
        values: the session's float32 values.
        table: the session's masters.
        weights: the parameters in the groups between steps, which are the model's. The list is always the same object.
        inner: for each weight the parameter in the groups while the optimizer's own code runs: its master, or the
            weight itself.
        masters: the masters of these weights.
        generation: a number that increases whenever the members change.
        groups_without_fused: the groups that a fused kernel would step wrongly.
    """

    def __init__(self, reference: weakref.ref[Optimizer], values: Float32Values, kind: MasterWeightsMode) -> None:
        self._reference = reference
        self.values = values
        self.table = values.masters
        self.names = values.masters.names
        self.weights: list[nn.Parameter] = []
        self.inner: list[nn.Parameter] = []
        self.masters: list[Master] = []
        self.generation = 0
        self.groups_without_fused: list[dict[str, Any]] = []
        self._kind = kind
        self._lists: list[tuple[list[Any], list[Any], list[Any]]] = []
        # The holders, if masters have to be put into their attributes, too; and those that have none there.
        self._private: Iterable[Optimizer] = ()
        self._known: WeakList[Optimizer] = WeakList()
        self._groups: list[dict[str, Any]] = []
        self._params: list[list[Any]] = []
        self._is_alone = True
        self._frozen: list[nn.Parameter] = []
        self._of_weight: dict[int, nn.Parameter] = {}
        self._of_inner: dict[int, nn.Parameter] = {}

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        optimizer = self._reference()
        assert optimizer is not None, "an optimizer that was freed is in no list"
        return optimizer

    def holders(self) -> list[Optimizer]:
        """List the optimizers that keep state for the members: this one and those that it wraps."""
        optimizer = self.optimizer
        return [optimizer, *wrapped_by(optimizer)]

    def parameters(self) -> list[nn.Parameter]:
        """List the present members of the groups, each once; changes nothing."""
        if self.are_as_seen():
            return self.weights
        groups = self._groups_of(self.holders())
        return list({id(p): p for group in groups for p in group["params"]}.values())

    def sync_groups(self) -> None:
        """Read the groups again if they have changed, and make masters of newly trainable weights."""
        if self.table.are_in_model:
            return  # the groups contain the parameters of a float32_weights block
        if not self.are_as_seen() or any(weight.requires_grad for weight in self._frozen):
            self._read_groups()

    def are_as_seen(self) -> bool:
        """Return whether the groups contain the same parameters as when they were last read."""
        groups = self.optimizer.param_groups if self._is_alone else self._groups_of(self.holders())
        if self.generation == 0 or not are_same(groups, self._groups):
            return False
        for group, known in zip(groups, self._params, strict=True):
            if group["params"] is not known:
                return False
        return all(are_same(known, weights) for known, weights, _ in self._lists)

    @staticmethod
    def _groups_of(holders: Sequence[Optimizer]) -> list[dict[str, Any]]:
        return [group for each in holders for group in each.param_groups]

    def _read_groups(self) -> None:
        holders = self.holders()
        self._groups, self._is_alone = self._groups_of(holders), len(holders) == 1
        self._params = [group["params"] for group in self._groups]
        lists = list({id(params): params for params in self._params}.values())
        weights = list({id(p): p for members in lists for p in members}.values())
        known = {id(master.weight): master for master in self.table}
        found = [known.get(id(weight)) or self._master_of(weight) for weight in weights]
        before, now = self.masters, [master for master in found if master is not None]
        for master in now:
            master.optimizers += 1
        for master in before:
            master.optimizers -= 1
        self.weights[:], self.masters = weights, now
        self.inner = [w if m is None else m.parameter for w, m in zip(weights, found, strict=True)]
        self._of_weight = {id(master.weight): master.parameter for master in self.masters}
        self._of_inner = {id(master.parameter): master.weight for master in self.masters}
        of_weight = self._of_weight
        self._lists = [(each, list(each), [of_weight.get(id(p), p) for p in each]) for each in lists]
        self._known = WeakList(filter(is_known, holders))
        self._private = WeakList(holders) if self.masters and len(self._known) < len(holders) else ()
        self._frozen = [
            weight
            for weight, master in zip(weights, found, strict=True)
            if master is None and not weight.requires_grad and is_lower_precision(weight.dtype)
        ]
        as_stepped: dict[torch.Tensor, torch.dtype] = {master.weight: torch.float32 for master in self.masters}
        self.groups_without_fused = stepped_wrongly(holders, self._groups, as_stepped)
        self.values.drop_if_unused(before)
        self.generation += 1

    def _master_of(self, weight: nn.Parameter) -> Master | None:
        if self._kind is MasterWeightsMode.NONE or not weight.requires_grad:
            return None
        if self._kind is MasterWeightsMode.IN_MODEL:
            if is_lower_precision(weight.dtype):
                convert(weight, torch.float32)
            return None
        master = self.table.add(weight, weight.dtype)
        if master is not None:
            original = self.values.casts.original_values(weight)
            self.table.cast(master, weight.dtype)
            if original is not None:
                # A forward pass may have saved the weight for its backward pass. The weight's numbers do not change.
                with _unsafe_preserve_version_counter(weight):
                    self.table.load(master, original)
            self.values.casts.mark_trained([weight])
        return master

    def master_for(self, parameter: Any) -> Any:
        """Return the master of a member that has one; any other object unchanged."""
        return self._of_weight.get(id(parameter), parameter)

    def weight_for(self, parameter: Any) -> Any:
        """Return the weight of a master; any other object unchanged."""
        return self._of_inner.get(id(parameter), parameter)

    def swap_in_masters(self) -> None:
        """Replace weights by masters in all lists, in place."""
        for each, _, inner in self._lists:
            each[:] = inner
        for holder in self._private:
            exchange_beside_groups(holder, self._of_weight)

    def swap_in_weights(self) -> None:
        """Replace masters by weights, also in groups that the optimizer's code has made or changed."""
        known = {id(each): (weights, inner) for each, weights, inner in self._lists}
        lists = [each for each, _, _ in self._lists]
        for holder in (self.optimizer,) if self._is_alone else self.holders():
            lists += [group["params"] for group in holder.param_groups if id(group["params"]) not in known]
        for each in lists:
            weights, inner = known.get(id(each), ([], None))
            each[:] = weights if inner is not None and are_same(each, inner) else list(map(self.weight_for, each))
        for holder in self._private:
            exchange_beside_groups(holder, self._of_inner)

    def exchange(self, others: Mapping[int, torch.Tensor]) -> None:
        """Replace parameters, by their ids, in all groups, private lists and states."""
        for holder in self.holders():
            for group in holder.param_groups:
                group["params"][:] = exchanged(group["params"], others)
            before = list(holder.state)
            keys = exchanged(before, others)
            if not are_same(keys, before):
                entries = list(holder.state.values())
                holder.state.clear()
                holder.state.update(zip(keys, entries, strict=True))
            if holder not in self._known and not is_known(holder):
                exchange_beside_groups(holder, others)

    def narrow_states(self) -> None:
        """Cast states that were loaded for float32 parameters back to the dtype of weights that are trained in it."""
        if self._kind is not MasterWeightsMode.NONE:
            return  # a weight without a master is frozen, and gets one when it is trained
        for holder in self.holders():
            for weight, state in holder.state.items():
                if isinstance(weight, torch.Tensor) and is_lower_precision(weight.dtype) and not self.table.of(weight):
                    cast_state(state, weight.shape, torch.float32, weight.dtype)


def exchange_beside_groups(optimizer: Optimizer, others: Mapping[int, torch.Tensor]) -> None:
    """Replace parameters, and ids of parameters, that an optimizer has outside of its groups.

    These are in its own attributes, lists, tuples, sets and dicts, and in states whose key is no parameter.
    """
    attributes = vars(optimizer)
    for name, value in list(attributes.items()):
        if name not in _KNOWN:
            attributes[name] = _exchanged(value, others, _DEEPEST)
    for key, value in attributes.get("state", {}).items():
        if not isinstance(key, torch.Tensor):
            _exchanged(value, others, _DEEPEST)


def _exchanged(value: Any, others: Mapping[int, torch.Tensor], depth: int) -> Any:
    """Return the value with its parameters replaced; dicts and lists are changed in place."""
    kind = type(value)
    if kind is int:
        return id(others[value]) if value in others else value
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    if depth == 0 or kind not in _CONTAINERS:
        return value
    before = [part for item in value.items() for part in item] if kind in _DICTS else list(value)
    now = [_exchanged(part, others, depth - 1) for part in before]
    if are_same(before, now):
        return value
    if kind in _DICTS:
        value.clear()
        value.update(zip(now[::2], now[1::2], strict=True))
        return value
    if kind is list:
        value[:] = now
        return value
    return kind(now)


def check_steps_its_groups(optimizer: Optimizer) -> None:
    """Refuse an optimizer that steps copies of its groups' parameters."""
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise ValueError(
            "ZeroRedundancyOptimizer steps an optimizer of its own over the model's 16-bit weights, and would not "
            "update float32 masters where they are. To shard masters and optimizer states over ranks call "
            "torch.distributed.fsdp.fully_shard(model) before the optimizer is made (FSDP2), and pass the optimizer "
            "inside it, without ZeroRedundancyOptimizer; or keep that, over float32 parameters, with "
            "master_weights=\"model\" or opt_level='O1'"
        )


class Snapshot:
    """The float32 numbers of an optimizer's parameters."""

    def __init__(self, members: Members) -> None:
        self._table = members.table
        self._masters = [(master, members.table.values(master).clone()) for master in members.masters]
        own = {id(master.weight) for master in members.masters}
        self._plain = [(weight, weight.detach().clone()) for weight in members.weights if id(weight) not in own]

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, values in self._plain:
            parameter.copy_(values)
        for master, values in self._masters:
            self._table.load(master, values)
