"""Parameters that an optimizer holds beside its groups: lists and dicts of its own, found and kept in step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

# What torch keeps there is dealt with by name.
_KNOWN: Final = frozenset({"param_groups", "state", "defaults"})
_DEEPEST: Final = 4


@final
class References:
    """Everything in an optimizer's attributes, groups and state aside, that may hold a parameter.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def replace(self, others: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Put the other parameter wherever one of these stands; lists and dicts are changed in place."""
        if not others:
            return
        by_id = {id(old): new for old, new in others.items()}
        for name, value in list(vars(self._optimizer).items()):
            if name not in _KNOWN and not isinstance(value, Optimizer):
                renewed = _replaced(value, by_id, _DEEPEST)
                if renewed is not value:
                    setattr(self._optimizer, name, renewed)


def _replaced(value: Any, others: Mapping[int, torch.Tensor], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    if depth == 0 or type(value) not in (list, tuple, dict, set):
        return value
    if type(value) is dict:
        return _replaced_in_dict(value, others, depth)
    items = [_replaced(item, others, depth - 1) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if type(value) is list:
        value[:] = items
        return value
    return type(value)(items)


def _replaced_in_dict(value: dict[Any, Any], others: Mapping[int, torch.Tensor], depth: int) -> dict[Any, Any]:
    if any(id(key) in others for key in value):
        entries = [(others.get(id(key), key), _replaced(item, others, depth - 1)) for key, item in value.items()]
        value.clear()
        value.update(entries)
        return value
    for key, item in value.items():
        renewed = _replaced(item, others, depth - 1)
        if renewed is not item:
            value[key] = renewed
    return value
