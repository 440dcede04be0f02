"""Whether a state by parameter names fits a model and its optimizers; looked at before anything is loaded.

torch finds out while it loads, or at the next step: by then half of the state is in.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from .basics.tables import counted
from .distributed.sharding import is_sharded

_NAMED: Final = 5


def model_faults(own: Mapping[str, Any], given: Any, strict: bool, whole: bool) -> list[str]:
    """What keeps a model's state from being loaded, a line each."""
    if not isinstance(given, Mapping):
        return [f"the model's state is a {type(given).__name__}, not a mapping of names"]
    faults = []
    if strict:
        faults += _named("the model's state lacks", [name for name in own if name not in given])
        faults += _named("the model has no", [name for name in given if name not in own])
    for name, mine in own.items():
        faults += _tensor_faults(repr(name), mine, given.get(name), whole)
    return faults


def optimizer_faults(own: Mapping[str, Any], given: Any, strict: bool, whole: bool) -> list[str]:
    """What keeps the optimizers' state from being loaded, a line each."""
    if not isinstance(given, Mapping):
        return [f"the optimizer's state is a {type(given).__name__}, not a mapping"]
    if "state" not in own:
        missing = [key for key in own if key not in given and (strict or key.startswith("param_groups."))]
        faults = _named("the optimizer's state lacks", missing)
        for key, mine in own.items():
            faults += _tensor_faults(repr(key), mine, given.get(key), whole)
        return faults
    if not isinstance(given.get("state"), Mapping) or not isinstance(given.get("param_groups"), list):
        return ["the optimizer's state has no 'state' and 'param_groups'"]
    faults = [*_group_faults(own["param_groups"], given["param_groups"])]
    if strict:
        faults += _named("the optimizer's state has none for", [n for n in own["state"] if n not in given["state"]])
        faults += _unwanted(own, given)
    return [*faults, *_entry_faults(own, given, whole)]


def _group_faults(own: list[dict[str, Any]], given: list[dict[str, Any]]) -> Iterator[str]:
    """torch matches groups by the names in them; one that it finds in two, or in none, loses its learning rate."""
    found = [set(group.get("params", ())) for group in given]
    for index, group in enumerate(own):
        names = set(group["params"])
        if names not in found:
            sizes = ", ".join(str(len(each)) for each in found) or "none"
            yield (
                f"no group of the optimizer's state has the {counted(len(names), 'parameter')} of group {index} "
                f"({', '.join(group['params'][:2])} first; groups saved: {sizes} parameters)"
            )


def _unwanted(own: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    for index, group in enumerate(own["param_groups"]):
        kept = [name for name in group["params"] if given["state"].get(name)]
        if kept and not any(name in own["state"] for name in group["params"]):
            keys = ", ".join(map(str, given["state"][kept[0]]))
            yield f"the optimizer's state has {keys} for {kept[0]!r}, and here group {index} keeps nothing"


def _entry_faults(own: Mapping[str, Any], given: Mapping[str, Any], whole: bool) -> Iterator[str]:
    for name, entries in own["state"].items():
        theirs = given["state"].get(name, {})
        for key, mine in entries.items() if isinstance(theirs, Mapping) else ():
            # One number a parameter is what every step of an optimizer keeps; the rest may come and go.
            if theirs and isinstance(mine, torch.Tensor) and mine.dim() > 0 and key not in theirs:
                yield f"the optimizer's state of {name!r} has no {key!r}, but {', '.join(map(str, theirs))}"
            yield from _tensor_faults(f"{key!r} of {name!r}", mine, theirs.get(key), whole)


def _tensor_faults(what: str, mine: Any, given: Any, whole: bool) -> Iterator[str]:
    # A single number, such as a count of steps, is kept as one or as a tensor.
    if not isinstance(mine, torch.Tensor) or given is None or mine.dim() == 0:
        return
    if not isinstance(given, torch.Tensor):
        yield f"{what} is a {type(given).__name__}, not a tensor"
    elif mine.shape != given.shape:
        yield f"{what} has the shape {tuple(given.shape)}, and here {tuple(mine.shape)}"
    elif is_sharded(given) and not is_sharded(mine):
        yield f"{what} is sharded, and here it is not: gather it with options=StateDictOptions(full_state_dict=True)"
    elif is_sharded(mine) and not is_sharded(given) and not whole:
        yield f"{what} is sharded here, and given whole: load with options=StateDictOptions(full_state_dict=True)"


def _named(fault: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{fault} {', '.join(map(repr, names[:_NAMED]))}{more}"]
