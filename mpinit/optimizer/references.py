"""Parameters that an optimizer holds beside its groups: lists and dicts of its own, found and kept in step.

Also where it knows a parameter by its ``id``, as keys of dicts and in sets, and inside of its state.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from .state import wrapped_by

# What torch keeps there is dealt with by name.
_KNOWN: Final = frozenset({"param_groups", "state", "defaults"})
_DEEPEST: Final = 4
_DICTS: Final = (dict, defaultdict, OrderedDict)


@final
class References:
    """Everything in an optimizer's attributes and state that may hold a parameter, groups and the state's keys aside.

    Those of optimizers that it wraps, too.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def replace(self, by_id: Mapping[int, torch.Tensor]) -> None:
        """Put the other parameter wherever one with these ids stands; lists and dicts are changed in place."""
        if not by_id:
            return
        for holder in (self._optimizer, *wrapped_by(self._optimizer)):
            for name, value in list(vars(holder).items()):
                if name not in _KNOWN and not isinstance(value, Optimizer):
                    renewed = _replaced(value, by_id, _DEEPEST)
                    if renewed is not value:
                        setattr(holder, name, renewed)
            state = getattr(holder, "state", {})
            for key, value in list(state.items()):
                state[key] = _replaced(value, by_id, _DEEPEST)


def _replaced(value: Any, others: Mapping[int, torch.Tensor], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    if depth == 0 or type(value) not in (list, tuple, set, *_DICTS):
        return value
    if type(value) in _DICTS:
        return _replaced_in_dict(value, others, depth)
    if type(value) is set:
        return {_known_as(item, others) for item in value} if any(_names(item, others) for item in value) else value
    items = [_replaced(item, others, depth - 1) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if type(value) is list:
        value[:] = items
        return value
    return type(value)(items)


def _replaced_in_dict(value: dict[Any, Any], others: Mapping[int, torch.Tensor], depth: int) -> dict[Any, Any]:
    if any(_names(key, others) for key in value):
        entries = [(_known_as(key, others), _replaced(item, others, depth - 1)) for key, item in value.items()]
        value.clear()
        value.update(entries)
        return value
    for key, item in value.items():
        renewed = _replaced(item, others, depth - 1)
        if renewed is not item:
            value[key] = renewed
    return value


def _names(key: Any, others: Mapping[int, torch.Tensor]) -> bool:
    """Whether a key is one of the parameters, or the ``id`` of one."""
    return id(key) in others or (type(key) is int and key in others)


def _known_as(key: Any, others: Mapping[int, torch.Tensor]) -> Any:
    if id(key) in others:
        return others[id(key)]
    return id(others[key]) if _names(key, others) else key
