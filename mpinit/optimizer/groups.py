"""The parameter groups of an optimizer: weights between steps, and masters while the optimizer's own code runs."""

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.bulk import are_same
from ..basics.weak_references import WeakList
from .members import wrapped_by

# Attributes of torch, which are handled separately.
_OF_TORCH: Final = frozenset({"param_groups", "state", "defaults"})
_DEEPEST: Final = 4
_DICTS: Final = (dict, defaultdict, OrderedDict)
_CONTAINERS: Final = (*_DICTS, list, tuple, set, frozenset)


class Groups:
    """The groups of an optimizer, and of the optimizers that it wraps, as they were read last.

    Attributes:
        are_replaced: whether they contain what replaces the weights now.
    """

    def __init__(self, reference: weakref.ref[Optimizer]) -> None:
        self.are_replaced = False
        self._reference = reference
        # The groups; their lists; each list once, with its weights and what replaces these.
        self._groups: list[dict[str, Any]] = []
        self._params: list[list[Any]] = []
        self._lists: list[tuple[list[Any], list[Any], list[Any]]] = []
        self._is_alone = True
        # For the id of a weight what replaces it, and for the id of that the weight.
        self._others: dict[int, nn.Parameter] = {}
        self._weights: dict[int, nn.Parameter] = {}
        # The optimizers whose other attributes may contain parameters.
        self._private: Iterable[Optimizer] = ()
        # For the id of each state: itself and the state under the masters, which has the same entries.
        self._inner_states: dict[int, _SwappedState] = {}
        self._exchanged: list[tuple[Any, _SwappedState]] = []

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            ReferenceError: it was freed, and a method of it was kept.
        """
        optimizer = self._reference()
        if optimizer is None:
            raise ReferenceError("the optimizer of this method was freed: keep it as long as its methods")
        return optimizer

    def holders(self) -> list[Optimizer]:
        """List the optimizers that keep state for the parameters: this one and those that it wraps."""
        optimizer = self.optimizer
        return [optimizer, *wrapped_by(optimizer)]

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters that are in the groups now, each once."""
        return list({id(p): p for group in _groups_of(self.holders()) for p in group["params"]}.values())

    def are_as_seen(self) -> bool:
        """Return whether the groups contain the same parameters as when they were read last."""
        groups = self._present()
        if not are_same(groups, self._groups):
            return False
        for group, params in zip(groups, self._params, strict=True):
            if group["params"] is not params:
                return False
        return all([are_same(each, inner if self.are_replaced else own) for each, own, inner in self._lists])  # noqa: C419

    def read(self) -> None:
        """Read the groups anew; nothing is replaced until :meth:`replace_by` is called."""
        holders = self.holders()
        self._groups, self._is_alone = _groups_of(holders), len(holders) == 1
        self._params = [group["params"] for group in self._groups]

    def replace_by(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]], is_private: bool) -> None:
        """Set what replaces weights while :attr:`are_replaced`.

        Args:
            pairs: a weight and what replaces it, each.
            is_private: whether optimizers may have parameters outside of their groups.
        """
        listed = list(pairs)
        self._others = {id(weight): other for weight, other in listed}
        self._weights = {id(other): weight for weight, other in listed}
        lists = {id(params): params for params in self._params}.values()
        self._lists = [(each, list(each), [self._others.get(id(p), p) for p in each]) for each in lists]
        self._private = WeakList(self.holders()) if listed and is_private else ()
        self.forget_states()

    def forget_states(self) -> None:
        """Make states under the masters anew at the next :meth:`replace`."""
        self._inner_states.clear()

    def _present(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self._is_alone else _groups_of(self.holders())

    def replace(self) -> None:
        """Replace the weights, in groups, states, and where optimizers keep parameters outside of both."""
        self.are_replaced = True
        for each, _, inner in self._lists:
            each[:] = inner
        for holder in self._private:
            _exchange_beside_groups(holder, self._others)
        for holder in (self.optimizer,) if self._is_alone else self.holders():
            if not self._others or "state" not in vars(holder):
                continue  # it shows the state of the optimizer that it wraps
            outer: Any = holder.state
            swapped = self._inner_states.get(id(outer))
            if swapped is None or not swapped.is_as_seen(outer):
                swapped = self._inner_states[id(outer)] = _SwappedState(outer, self._others)
            self._exchanged.append((holder, swapped))
            vars(holder)["state"] = swapped.inner

    def put_back(self) -> None:
        """Put the weights back, also into groups and states that the optimizer's code has made or replaced."""
        for each, weights, inner in self._lists:
            each[:] = weights if are_same(each, inner) else [self._weights.get(id(p), p) for p in each]
        params = [group["params"] for group in self._present()]
        for each in () if are_same(params, self._params) else params:
            each[:] = [self._weights.get(id(p), p) for p in each]
        for holder in self._private:
            _exchange_beside_groups(holder, self._weights)
        while self._exchanged:
            holder, swapped = self._exchanged[-1]
            swapped.bring_back(vars(holder)["state"], self._weights)
            vars(holder)["state"] = swapped.outer
            self._exchanged.pop()  # last, because after an interruption this runs again
        self.are_replaced = False


def _groups_of(holders: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [group for each in holders for group in each.param_groups]


class _SwappedState:
    """The state of an optimizer as it is between steps, and the same entries under the masters.

    Attributes:
        outer: the state under the weights.
        inner: the state under the masters; kept from step to step, because the hash of a tensor is a call of Python.
    """

    def __init__(self, outer: Any, others: Mapping[int, Any]) -> None:
        self.outer = outer
        self.inner = defaultdict(outer.default_factory) if isinstance(outer, defaultdict) else type(outer)()
        self.inner.update(zip([others.get(id(key), key) for key in outer], outer.values(), strict=True))
        self._values = [*outer.values()]

    def is_as_seen(self, outer: Any) -> bool:
        """Return whether ``outer`` is the same state with the same values, which have the same keys then."""
        return outer is self.outer and are_same([*outer.values()], self._values)

    def bring_back(self, inner: Any, weights: Mapping[int, Any]) -> None:
        """Let the outer state have what the optimizer's code has left in the inner one, or in another in its place."""
        if inner is self.outer:
            return
        values = [*inner.values()]
        if are_same(values, self._values):
            return
        keys = [weights.get(id(key), key) for key in inner]
        self.outer.clear()
        self.outer.update(zip(keys, values, strict=True))
        self.inner, self._values = inner, values


def _exchange_beside_groups(optimizer: Optimizer, others: Mapping[int, torch.Tensor]) -> None:
    """Replace parameters, and ids of parameters, that an optimizer has outside of its groups.

    These are in its own attributes, lists, tuples, sets and dicts, and in states whose key is no parameter.
    """
    attributes = vars(optimizer)
    for name, value in list(attributes.items()):
        if name not in _OF_TORCH:
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
