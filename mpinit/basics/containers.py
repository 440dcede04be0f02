"""Containers that arguments and results of a model come in: their parts, a copy of one, and writing to it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final, final

import torch


class Container(ABC):
    """What can be done to containers of one kind. Parts are known by keys that mean the same in a copy."""

    @abstractmethod
    def parts(self, box: Any) -> dict[Any, Any]:
        """A new dict of what ``box`` holds."""

    @abstractmethod
    def copy(self, box: Any) -> Any:
        """A shallow copy, of the same type, that is written to without ``box`` noticing."""

    @abstractmethod
    def write(self, box: Any, changed: Mapping[Any, Any], dropped: Iterable[Any]) -> None:
        """Put the parts ``changed`` in and take the keys ``dropped`` out."""


@final
class _Dict(Container):
    """Exactly dict."""

    def parts(self, box: dict[Any, Any]) -> dict[Any, Any]:
        return dict(box)

    def copy(self, box: dict[Any, Any]) -> dict[Any, Any]:
        return dict(box)

    def write(self, box: dict[Any, Any], changed: Mapping[Any, Any], dropped: Iterable[Any]) -> None:
        box.update(changed)
        for key in dropped:
            del box[key]


@final
class _List(Container):
    """Lists and their subclasses; keys are positions."""

    def parts(self, box: list[Any]) -> dict[Any, Any]:
        return dict(enumerate(box))

    def copy(self, box: list[Any]) -> list[Any]:
        return list(box) if type(box) is list else copy.copy(box)

    def write(self, box: list[Any], changed: Mapping[Any, Any], dropped: Iterable[Any]) -> None:
        parts = {**dict(enumerate(box)), **changed}
        for key in dropped:
            del parts[key]
        box[:] = list(parts.values())


@final
class _MutableMapping(Container):
    """Subclasses of dict, and mappings of other origin."""

    def parts(self, box: MutableMapping[Any, Any]) -> dict[Any, Any]:
        return dict(box.items())

    def copy(self, box: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
        copied = copy.copy(box)
        # A shallow copy may share the dict that it keeps its items in.
        for name, value in vars(copied).items() if hasattr(copied, "__dict__") else ():
            if isinstance(value, dict) and value is vars(box).get(name):
                vars(copied)[name] = copy.copy(value)
        return copied

    def write(self, box: MutableMapping[Any, Any], changed: Mapping[Any, Any], dropped: Iterable[Any]) -> None:
        for key, value in changed.items():
            box[key] = value
        for key in dropped:
            del box[key]


@final
class _Attributes(Container):
    """Dataclasses, and objects that can move to a device: what they hold is their attributes."""

    def parts(self, box: Any) -> dict[Any, Any]:
        names = dict.fromkeys(_slots(type(box))) | (dict.fromkeys(vars(box)) if hasattr(box, "__dict__") else {})
        return {name: getattr(box, name) for name in names if hasattr(box, name)}

    def copy(self, box: Any) -> Any:
        return copy.copy(box)

    def write(self, box: Any, changed: Mapping[Any, Any], dropped: Iterable[Any]) -> None:
        for name, value in changed.items():
            object.__setattr__(box, name, value)  # frozen dataclasses included, and no setter of the user's runs twice
        for name in dropped:
            object.__delattr__(box, name)


@final
class _Stores(Container):
    """Graphs as torch_geometric has them: everything lies in the mappings ``graph.stores``, one a kind of node."""

    def parts(self, box: Any) -> dict[Any, Any]:
        return {(store._key, key): value for store in box.stores for key, value in store.items()}

    def copy(self, box: Any) -> Any:
        return copy.copy(box)

    def write(self, box: Any, changed: Mapping[Any, Any], dropped: Iterable[Any]) -> None:
        for (kind, key), value in changed.items():
            self._store(box, kind)[key] = value
        for kind, key in dropped:
            del self._store(box, kind)[key]

    def _store(self, box: Any, kind: Any) -> Any:
        found = [store for store in box.stores if store._key == kind]
        return found[0] if found else box[kind]  # which makes one


_DICT: Final = _Dict()
_LIST: Final = _List()
_MAPPING: Final = _MutableMapping()
_ATTRIBUTES: Final = _Attributes()
_STORES: Final = _Stores()


def container_of(tree: Any) -> Container | None:
    """What can be done to ``tree``, or None where it is no container that can be written to."""
    if type(tree) is dict:
        return _DICT
    if isinstance(tree, list):
        return _LIST
    if isinstance(tree, MutableMapping):
        return _MAPPING
    if isinstance(tree, Mapping):
        return None
    if dataclasses.is_dataclass(tree):
        return _ATTRIBUTES
    if callable(getattr(tree, "to", None)):
        stores = getattr(tree, "stores", None)
        return _STORES if isinstance(stores, list) and all(hasattr(store, "_key") for store in stores) else _ATTRIBUTES
    return None


def converted(tree: Any, dtype: torch.dtype) -> Any:
    """An object that shows nothing of what it holds, converted by itself if its ``to`` says that it takes a dtype."""
    try:
        takes_dtype = "dtype" in inspect.signature(tree.to).parameters
    except (TypeError, ValueError):
        takes_dtype = False
    return tree.to(dtype=dtype) if takes_dtype else tree


def rebuilt_tuple(tree: tuple[Any, ...], leaves: list[Any]) -> Any:
    """A tuple of the type of ``tree`` that holds ``leaves``."""
    if type(tree) is tuple:
        return tuple(leaves)
    try:
        # Past the subclass's own __new__: its arguments need not be the items.
        renewed = tuple.__new__(type(tree), leaves)
    except TypeError:
        return type(tree)(leaves)  # torch.return_types: classes written in C insist on their own constructor
    if hasattr(tree, "__dict__"):
        vars(renewed).update(vars(tree))
    return renewed


def rebuilt_mapping(tree: Mapping[Any, Any], cast: Callable[[Any], Any]) -> Any:
    """A mapping that cannot be written to, made anew with its values cast; itself where none changed."""
    changed = {key: cast(value) for key, value in tree.items()}
    if all(value is tree[key] for key, value in changed.items()):
        return tree
    return type(tree)(changed)  # type: ignore[call-arg]


def _slots(kind: type) -> list[str]:
    found = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return found
