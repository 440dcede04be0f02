"""An optimizer's options: what two of one class that have the same do alike."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def options_of(optimizer: Optimizer) -> tuple[Any, ...]:
    """Everything that an optimizer's class and sizes do not say."""
    groups = [options_of_group(group) for group in optimizer.param_groups]
    devices = {str(p.device) for group in optimizer.param_groups for p in group["params"]}
    return repr(optimizer.defaults), repr(list(dict.fromkeys(groups))), repr(plain(vars(optimizer))), *sorted(devices)


def options_of_group(group: dict[str, Any]) -> str:
    """:func:`options_of`, for one group."""
    dimensions = sorted({p.dim() for p in group["params"]})
    return repr(({k: v for k, v in plain(group).items() if not _counts(k)}, dimensions))


def _counts(key: str) -> bool:
    """Whether an entry moves with every step or schedule: no option, and no reason to try again."""
    return key in ("lr", "initial_lr", "step", "k", "weight_sum", "lr_max", "scheduled_lr")


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Entries that are numbers, names and tuples of them."""
    kinds = (bool, int, float, str, tuple, type(None))
    return {key: value for key, value in values.items() if isinstance(value, kinds) and not key.startswith("_")}


def switched_on(optimizer: Optimizer) -> list[Any]:
    """The words and flags in an optimizer's groups, and which of their numbers are not 0: all that it may turn on."""
    return [
        [(key, _switch(value)) for key, value in plain(group).items() if not _counts(key)]
        for group in optimizer.param_groups
    ]


def _switch(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_switch, value))
    return value != 0 if isinstance(value, (int, float)) else value
