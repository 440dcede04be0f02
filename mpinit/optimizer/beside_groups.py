"""Parameters that an optimizer keeps outside of its groups, which are exchanged for masters while its own code runs."""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ..basics.bulk import are_same

# Attributes of torch, which are handled separately.
_OF_TORCH: Final = frozenset({"param_groups", "state", "defaults"})
_DEEPEST: Final = 4
_DICTS: Final = (dict, defaultdict, OrderedDict)
_CONTAINERS: Final = (*_DICTS, list, tuple, set, frozenset)


def exchange_beside_groups(optimizer: Optimizer, others: Mapping[int, torch.Tensor]) -> None:
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
