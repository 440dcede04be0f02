"""Casting what goes into a model and what comes out, whatever containers hold it, and carrying back what was written.

A container is copied only where something in it changes. The caller's own objects keep the types they have; what a
model writes into its copy of one (an entry, an attribute, an element of a tensor) is written into the caller's too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from .containers import Container, container_of, converted, rebuilt_mapping, rebuilt_tuple

# Neither walked nor cast.
_LEAVES: Final = (str, bytes, int, float, complex, torch.nn.Module, type)


def cast_tree(tree: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor in a nest of containers to ``dtype``; everything else keeps its identity.

    Lists, tuples, named tuples, dicts and their subclasses, other mappings, dataclasses, and objects that are no
    tensors but have a ``.to`` method (batches of all kinds, torch_geometric's Data among them) are walked; a container
    none of whose leaves changed is returned as it is, any other as a copy of its own type. Integer, bool and complex
    tensors, numbers, strings, numpy arrays and modules are left alone. Gradients flow back through the casts.

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
    return TreeCast(dtype)(tree)


def first_floating_dtype(tree: Any) -> torch.dtype | None:
    """The dtype of the first floating tensor in lists, tuples and dicts, or None where there is none.

    Example:
        >>> first_floating_dtype((torch.arange(2), {"x": torch.ones(2)}))
        torch.float32
    """
    if isinstance(tree, torch.Tensor):
        return tree.dtype if tree.is_floating_point() else None
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return next((dtype for dtype in map(first_floating_dtype, values) if dtype is not None), None)


class TreeCast:
    """Casts of several trees that belong together, the arguments of one call say, and the way back.

    What two of the trees share is shared afterwards, and a tree may hold itself.

    Args:
        dtype: the floating dtype that floating tensors get.
        originals: what stands for what in results: the id of what was passed -> the caller's own.

    Example:
        >>> batch = {"x": torch.ones(2)}
        >>> cast = TreeCast(torch.float16)
        >>> passed = cast(batch)
        >>> passed["y"] = passed["x"] + 1
        >>> cast.write_back(torch.float32)
        >>> batch["x"].dtype, batch["y"]
        (torch.float32, tensor([2., 2.]))
    """

    __slots__ = ("_by_identity", "_dtype", "_is_same", "_leaves", "_originals", "_seen", "_walked")

    def __init__(self, dtype: torch.dtype, originals: dict[int, Any] | None = None) -> None:
        self._dtype = dtype
        # Compiled code cannot ask for an object's id or a tensor's version.
        self._by_identity = not torch.compiler.is_compiling()
        self._seen: dict[int, _Visit] = {}
        self._leaves: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._is_same: Callable[[Any, Any], bool] = operator.is_ if self._by_identity else _is_same
        self._walked: list[tuple[_Visit, dict[Any, Any]]] = []
        self._originals: dict[int, Any] = originals or {}

    def __call__(self, tree: Any) -> Any:
        """The tree with its floating tensors in the dtype."""
        if self._originals:
            tree = self._originals.get(id(tree), tree)
        if isinstance(tree, torch.Tensor):
            if not tree.is_floating_point() or tree.dtype is self._dtype:
                return tree
            cast = tree.to(self._dtype)
            if self._by_identity:
                self._leaves.append((tree, cast, -1 if cast.is_inference() else cast._version))
            else:
                self._leaves.append((tree, cast, -1))
            return cast
        if tree is None or isinstance(tree, _LEAVES):
            return tree
        if isinstance(tree, tuple):
            leaves = [self(value) for value in tree]
            same = [self._is_same(new, old) for new, old in zip(leaves, tree, strict=True)]
            return tree if all(same) else rebuilt_tuple(tree, leaves)
        if isinstance(tree, torch.fx.Proxy):
            return tree.to(self._dtype)
        return self._cast_container(tree)

    def _cast_container(self, tree: Any) -> Any:
        container = container_of(tree)
        if container is None:
            return rebuilt_mapping(tree, self) if isinstance(tree, Mapping) else tree
        visit = _Visit(container, tree)
        if self._by_identity:
            known = self._seen.setdefault(id(tree), visit)
            if known is not visit:
                return known.result if known.is_over else known.copied()
        before = container.parts(tree)
        if not before and hasattr(tree, "to"):
            return converted(tree, self._dtype)
        after = {key: self(value) for key, value in before.items()}
        changed = {key: value for key, value in after.items() if not self._is_same(value, before[key])}
        if changed:
            container.write(visit.copied(), changed, ())
            after = container.parts(visit.result)
        visit.is_over = True
        self._walked.append((visit, after))
        return visit.result

    def write_back(self, dtype: torch.dtype) -> None:
        """Write what was written to the trees as cast into the trees as given.

        Args:
            dtype: what floating tensors that are new in a container get.
        """
        originals = {}
        for original, cast, version in self._leaves:
            if version >= 0 and (cast._version == version or write_elements(original, cast)):
                originals[id(cast)] = original
        if len(originals) == len(self._leaves):
            # Where it is not known whether a tensor was written to, none of the caller's may stand for what was passed.
            originals |= {id(visit.result): visit.given for visit, _ in self._walked if visit.is_copied}
            self._originals = originals
        for visit, before in self._walked:
            now = visit.container.parts(visit.result)
            new = {k: value for k, value in now.items() if k not in before or not self._is_same(before[k], value)}
            dropped = [key for key in before if key not in now] if visit.is_copied else []
            if new or dropped:
                brought_back = {key: self.back(value, dtype) for key, value in new.items()}
                visit.container.write(visit.given, brought_back, dropped)

    def back(self, tree: Any, dtype: torch.dtype) -> Any:
        """A result, cast: what the trees as cast hold is what the trees as given held, to the bit.

        Args:
            tree: a result of what the trees were passed to.
            dtype: what its floating tensors get.
        """
        return TreeCast(dtype, self._originals)(tree)


class _Visit:
    """One container on the walk; it is copied when something in it changes, or when it turns out to hold itself."""

    __slots__ = ("container", "given", "is_copied", "is_over", "result")

    def __init__(self, container: Container, given: Any) -> None:
        self.container = container
        self.given = given
        self.result = given
        self.is_copied = self.is_over = False

    def copied(self) -> Any:
        """The copy, made once."""
        if not self.is_copied:
            self.result = self.container.copy(self.given)
            self.is_copied = True
        return self.result


def _is_same(one: Any, other: Any) -> bool:
    """Whether two objects are one, or dicts of the same: the compiler of torch 2.11 cannot tell dicts by identity."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_is_same(one[key], other[key]) for key in one)
    return one is other


def write_elements(original: torch.Tensor, cast: torch.Tensor) -> bool:
    """Write the elements of a copy that was cast and written to into what it was made of.

    Elements that are still what the cast made of them keep their bits.

    Returns:
        Whether it could be done: a leaf that requires a gradient cannot be written to.

    Example:
        >>> original, cast = torch.tensor([0.1, 0.1]), torch.tensor([0.1, 0.5]).half()
        >>> write_elements(original, cast), original
        (True, tensor([0.1000, 0.5000]))
    """
    if original.is_leaf and original.requires_grad and torch.is_grad_enabled():
        return False
    was = original.detach().to(cast.dtype)
    original.copy_(torch.where(cast == was, original, cast.to(original.dtype)))
    return True
