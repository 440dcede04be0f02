"""Walking the arguments and results of a model: containers are rebuilt only where a leaf changed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def cast_tree(tree: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor in a nest of containers to ``dtype``; everything else keeps its identity.

    Lists, tuples, named tuples, dicts and their subclasses, other mappings and dataclasses are walked; a container
    none of whose leaves changed is returned as it is. An object that is not a tensor but has ``.to(dtype)`` (a
    ``PackedSequence``, a graph batch) is asked to convert itself. Integer, bool and complex tensors, numbers,
    strings, numpy arrays and modules are left alone. Gradients flow back through the casts.

    Args:
        tree: any object.
        dtype: the floating dtype that floating tensors get.

    Returns:
        The tree with its floating tensors in ``dtype``.

    Example:
        >>> import torch
        >>> cast_tree({"x": torch.ones(2), "n": 3}, torch.float16)["x"].dtype
        torch.float16
    """
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() and tree.dtype != dtype else tree
    if tree is None or isinstance(tree, (str, bytes, int, float, complex, torch.nn.Module, type)):
        return tree
    if isinstance(tree, dict) and type(tree) is dict:
        return _rebuilt_if_changed(tree, {key: cast_tree(value, dtype) for key, value in tree.items()})
    if type(tree) in (list, tuple):
        leaves = [cast_tree(value, dtype) for value in tree]
        changed = any(new is not old for new, old in zip(leaves, tree, strict=True))
        return type(tree)(leaves) if changed else tree
    return _cast_other(tree, dtype)


def _rebuilt_if_changed(old: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
    return new if any(new[key] is not old[key] for key in old) else old


def _cast_other(tree: Any, dtype: torch.dtype) -> Any:
    """Everything that is not a plain list, tuple or dict: rarer, and open to users' own classes."""
    if isinstance(tree, Mapping):
        return _cast_mapping(tree, dtype)
    if callable(getattr(tree, "to", None)):
        try:
            return tree.to(dtype)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            # A ``to`` that means something else, a device only, say: what the object holds may still be walked.
            pass
    if isinstance(tree, (list, tuple)):
        leaves = [cast_tree(value, dtype) for value in tree]
        if all(new is old for new, old in zip(leaves, tree, strict=True)):
            return tree
        return _rebuild_sequence(tree, leaves)
    if dataclasses.is_dataclass(tree):
        return _cast_dataclass(tree, dtype)
    return tree


def _rebuild_sequence(tree: list[Any] | tuple[Any, ...], leaves: list[Any]) -> Any:
    if isinstance(tree, list):
        rebuilt = copy.copy(tree)
        rebuilt[:] = leaves
        return rebuilt
    try:
        # Past the subclass's own __new__: its arguments need not be the items.
        renewed = tuple.__new__(type(tree), leaves)
    except TypeError:
        return type(tree)(leaves)  # torch.return_types: classes written in C insist on their own constructor
    if hasattr(tree, "__dict__"):
        vars(renewed).update(vars(tree))
    return renewed


def _cast_mapping(tree: Mapping[Any, Any], dtype: torch.dtype) -> Any:
    changed = {}
    for key, value in tree.items():
        cast = cast_tree(value, dtype)
        if cast is not value:
            changed[key] = cast
    if not changed:
        return tree
    if isinstance(tree, MutableMapping):
        rebuilt = copy.copy(tree)
        _own_storage(rebuilt, tree)
        for key, value in changed.items():
            rebuilt[key] = value
        return rebuilt
    return type(tree)({**tree, **changed})  # type: ignore[call-arg]


def _own_storage(rebuilt: MutableMapping[Any, Any], tree: MutableMapping[Any, Any]) -> None:
    """Give a shallow copy dicts of its own, or writing to it would write to the user's object."""
    for name, value in vars(rebuilt).items() if hasattr(rebuilt, "__dict__") else ():
        if isinstance(value, dict) and value is vars(tree).get(name):
            vars(rebuilt)[name] = copy.copy(value)


def _cast_dataclass(tree: Any, dtype: torch.dtype) -> Any:
    changed = {}
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name, None)  # a field may never have been set
        cast = cast_tree(value, dtype)
        if cast is not value:
            changed[field.name] = cast
    if not changed:
        return tree
    rebuilt = copy.copy(tree)
    for name, value in changed.items():
        object.__setattr__(rebuilt, name, value)  # frozen dataclasses included, __post_init__ not run twice
    return rebuilt
