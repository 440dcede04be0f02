"""Casts of nested containers: a model's inputs and outputs.

A container is copied only if something inside it is cast. The caller's objects keep their types. Writes of a model into
its copy of a container or tensor are copied back into the caller's.
"""

import collections
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final

import torch
from torch.utils._pytree import SUPPORTED_NODES

from .input_classes import REGISTERED, registered_cast

TensorCast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
# Types that are neither walked nor cast.
_LEAVES: Final = (str, bytes, int, float, complex, torch.nn.Module, type)


def tensors_in(tree: Any, depth: int = 8) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results, also inside containers, which :func:`cast_tree` lists."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    parts: Iterable[Any] = ()
    if isinstance(tree, tuple):
        parts = tree
    elif isinstance(tree, (list, MutableMapping)) or (dataclasses.is_dataclass(tree) and not isinstance(tree, type)):
        parts = _parts_of(tree).values()
    elif type(tree) in SUPPORTED_NODES:
        parts = SUPPORTED_NODES[type(tree)].flatten_fn(tree)[0]
    elif _is_graph(type(tree)):
        parts = tree.stores
    for part in parts if depth else ():
        yield from tensors_in(part, depth - 1)


def cast_tree(tree: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor in a nest of containers to ``dtype``.

    Containers are lists, tuples, named tuples (such as PackedSequence), dicts, UserDict, dataclasses, subclasses of
    these (such as transformers' ModelOutput and BatchEncoding), tensordicts, graphs of torch_geometric, and classes
    that are registered in torch's pytree. A container is copied if a tensor in it is cast; otherwise it is returned
    itself. Objects of a class that was registered by ``register_input`` are cast by the registered function. All other
    objects are returned unchanged. Gradients flow back through the casts.
    """
    return TreeCast(dtype)(tree)


class TreeCast:
    """The casts of several trees of one call, such as a model's arguments, and the reverse casts for its results.

    A container, tensor or other object that occurs twice is cast once. Cycles are allowed.

    Args:
        dtype: the dtype of the casts; None: nothing is cast, and only ``originals`` are replaced.
        originals: the id of a cast part -> the caller's own object, which replaces the part in results.
        cast: a function that casts one tensor.
    """

    __slots__ = (
        "_by_identity",
        "_cast",
        "_casts",
        "_dtype",
        "_is_same",
        "_leaves",
        "_originals",
        "_seen",
        "_walked",
    )

    def __init__(
        self, dtype: torch.dtype | None, originals: dict[int, Any] | None = None, cast: TensorCast = torch.Tensor.to
    ) -> None:
        self._dtype = dtype
        self._cast = cast
        # Compiled code cannot read an object's id or a tensor's version.
        self._by_identity = not torch.compiler.is_compiling()
        self._seen: dict[int, _Visit] = {}
        # The id of each object that is cast as a whole -> it, which keeps the id valid, and its cast.
        self._casts: dict[int, tuple[Any, Any]] = {}
        self._leaves: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._is_same: Callable[[Any, Any], bool] = operator.is_ if self._by_identity else _is_same
        self._walked: list[tuple[_Visit, dict[Any, Any]]] = []
        self._originals: dict[int, Any] = originals or {}

    def __call__(self, tree: Any) -> Any:
        if self._originals:
            tree = self._originals.get(id(tree), tree)
        if self._casts:  # empty in compiled code
            known = self._casts.get(id(tree))
            if known is not None:
                return known[1]
        if isinstance(tree, torch.Tensor):
            if not tree.is_floating_point() or self._dtype is None or tree.dtype is self._dtype:
                return tree
            return self._cast_tensor(tree, self._dtype)
        if tree is None or isinstance(tree, _LEAVES):
            return tree
        if REGISTERED and (cast_object := registered_cast(type(tree))) is not None:
            return tree if self._dtype is None else self._remember(tree, cast_object(tree, self._dtype))
        if isinstance(tree, tuple):
            leaves = [self(value) for value in tree]
            same = [self._is_same(new, old) for new, old in zip(leaves, tree, strict=True)]
            return tree if all(same) else self._remember(tree, _rebuilt_tuple(tree, leaves))
        if isinstance(tree, torch.fx.Proxy):
            return tree if self._dtype is None else tree.to(self._dtype)
        return self._cast_container(tree)

    def _cast_tensor(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        if not self._by_identity:
            for original, known, _ in self._leaves:
                if original is tensor:
                    return known
        cast = self._cast(tensor, dtype)
        is_counted = self._by_identity and not cast.is_inference()
        self._leaves.append((tensor, cast, cast._version if is_counted else -1))
        return self._remember(tensor, cast)

    def _remember(self, part: Any, cast: Any) -> Any:
        """Return the cast of a part for all its occurrences; a cycle may have led to the part, and cast it, already."""
        return self._casts.setdefault(id(part), (part, cast))[1] if self._by_identity else cast

    def _cast_container(self, tree: Any) -> Any:
        is_walked = isinstance(tree, (list, MutableMapping)) or dataclasses.is_dataclass(tree)
        if not is_walked and not _is_object_of_tensors(type(tree)):
            return tree
        visit = _Visit(tree)
        if self._by_identity:
            known = self._seen.setdefault(id(tree), visit)
            if known is not visit:
                return known.result if known.is_over else known.copied()
        if not is_walked:
            visit.result = self._cast_graph(tree) if _is_graph(type(tree)) else self._cast_node(tree)
            visit.is_over = True
            visit.is_copied = visit.result is not tree
            if visit.is_copied:
                self._walked.append((visit, _parts_of(visit.result)))
            return visit.result
        before = _parts_of(tree)
        after = {key: self(value) for key, value in before.items()}
        changed = {key: value for key, value in after.items() if not self._is_same(value, before[key])}
        if changed:
            _write(visit.copied(), changed, ())
            after = _parts_of(visit.result)
        visit.is_over = True
        self._walked.append((visit, after))
        return visit.result

    def _cast_graph(self, graph: Any) -> Any:
        """Cast the tensors in the stores of a graph of torch_geometric, which are mappings that know their graph."""
        copied, walked, is_changed = copy.copy(graph), [], False
        for store, twin in zip(graph.stores, copied.stores, strict=True):
            before = dict(store.items())
            changed = {key: new for key, old in before.items() if not self._is_same(new := self(old), old)}
            is_changed = is_changed or bool(changed)
            _write(twin, changed, ())
            visit = _Visit(store)
            visit.result, visit.is_copied = twin, True
            walked.append((visit, dict(twin.items())))
        if not is_changed:
            return graph
        self._walked += walked
        return copied

    def _cast_node(self, tree: Any) -> Any:
        """Rebuild an object of a class that is registered in torch's pytree from casts of its parts."""
        node = SUPPORTED_NODES[type(tree)]
        before, context = node.flatten_fn(tree)
        parts = [self(part) for part in before]
        is_same = all(self._is_same(new, old) for new, old in zip(parts, before, strict=True))
        return tree if is_same else node.unflatten_fn(parts, context)

    def write_back(self, dtype: torch.dtype | None) -> None:
        """Copy writes to the cast trees into the caller's trees; new parts are cast to ``dtype``, if it is not None."""
        originals: dict[int, Any] = {}
        for original, cast, version in self._leaves:
            if version >= 0 and (cast._version == version or write_elements(original, cast, self._cast)):
                originals[id(cast)] = original
        if len(originals) == len(self._leaves):
            # Where it is not known whether a tensor was written to, none of the caller's may replace what was passed.
            originals |= {id(visit.result): visit.original for visit, _ in self._walked if visit.is_copied}
            self._originals = originals
        for visit, before in self._walked:
            now = _parts_of(visit.result)
            new = {k: value for k, value in now.items() if k not in before or not self._is_same(before[k], value)}
            dropped = [key for key in before if key not in now] if visit.is_copied else []
            if new or dropped:
                brought_back = {key: self.back(value, dtype) for key, value in new.items()}
                _write(visit.original, brought_back, dropped)

    def back(self, tree: Any, dtype: torch.dtype | None) -> Any:
        """Cast a result; a part that is one of the cast trees becomes the caller's tensor or container itself."""
        return TreeCast(dtype, self._originals)(tree)


class _Visit:
    """A visited container; it is copied when a part changes, or when it contains itself."""

    __slots__ = ("is_copied", "is_over", "original", "result")

    def __init__(self, original: Any) -> None:
        self.original = original
        self.result = original
        self.is_copied = self.is_over = False

    def copied(self) -> Any:
        if not self.is_copied:
            self.result = _copy_of(self.original)
            self.is_copied = True
        return self.result


def _is_graph(kind: type) -> bool:
    """Return whether a class is one of torch_geometric's graphs or batches of them; that package is not imported."""
    return any(
        base.__name__ == "BaseData" and base.__module__.startswith("torch_geometric.data") for base in kind.__mro__
    )


def _is_object_of_tensors(kind: type) -> bool:
    """Return whether objects of a class that is no container are known to contain tensors, and how they are rebuilt.

    A cache of transformers has a model's own numbers, and is written to by methods: a rebuilt one would be another.
    So it would with a deque.
    """
    if kind in SUPPORTED_NODES:
        return kind is not collections.deque and not kind.__module__.startswith("transformers.")
    return _is_graph(kind)


def _parts_of(box: Any) -> dict[Any, Any]:
    """Return the parts of a container in a new dict, under keys that are valid for a copy of it."""
    if isinstance(box, list):
        return dict(enumerate(box))
    if isinstance(box, MutableMapping):
        return dict(box.items())
    names = [field.name for field in dataclasses.fields(box)] if dataclasses.is_dataclass(box) else []
    return {name: getattr(box, name) for name in [*names, *getattr(box, "__dict__", ())] if hasattr(box, name)}


def _copy_of(box: Any) -> Any:
    """Make a shallow copy of the same type; writes to it do not reach ``box``."""
    if type(box) in (dict, list):
        return box.copy()
    if isinstance(box, MutableMapping) and dataclasses.is_dataclass(box):
        # transformers' ModelOutput; torch.compile omits what copy.copy copies.
        return type(box)(**dict(box.items()))
    copied = copy.copy(box)
    # A shallow copy of a UserDict's subclass may share the dict that its items are in.
    for name, value in vars(copied).items() if isinstance(box, MutableMapping) and hasattr(copied, "__dict__") else ():
        if isinstance(value, dict) and value is vars(box).get(name):
            vars(copied)[name] = copy.copy(value)
    return copied


def _write(box: Any, changed: Mapping[Any, Any], dropped: Iterable[Any]) -> None:
    if isinstance(box, list):
        parts = {**dict(enumerate(box)), **changed}
        for key in dropped:
            del parts[key]
        box[:] = list(parts.values())
    elif isinstance(box, MutableMapping):
        for key, value in changed.items():
            box[key] = value
        for key in dropped:
            del box[key]
    else:
        for name, value in changed.items():
            object.__setattr__(box, name, value)  # frozen dataclasses included, and no setter of the user's runs twice
        for name in dropped:
            object.__delattr__(box, name)


def _rebuilt_tuple(tree: tuple[Any, ...], leaves: list[Any]) -> Any:
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


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two objects are identical, or dicts of identical ones.

    torch.compile (2.11) cannot compare dicts by identity.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_is_same(one[key], other[key]) for key in one)
    return one is other


def write_elements(original: torch.Tensor, cast: torch.Tensor, by: TensorCast = torch.Tensor.to) -> bool:
    """Write the changed elements of a cast copy into the original.

    Args:
        original: the tensor that was cast.
        cast: its copy, which was written to.
        by: the cast that made it.

    Returns:
        Whether that was possible.

    Elements that are still what the cast made of them keep their bits. A leaf that requires a gradient cannot be
    written to.
    """
    if original.is_leaf and original.requires_grad and torch.is_grad_enabled():
        return False
    was = by(original.detach(), cast.dtype)
    original.copy_(torch.where(cast == was, original, cast.to(original.dtype)))
    return True
