"""References to models, modules and optimizers that keep none of them alive.

A session is kept alive by the patched methods of its models and optimizers. It refers to these weakly: so a model that
its user drops is freed at once, with its session and its float32 masters, and not whenever the collector runs.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableSet, Sequence
from typing import Any, TypeVar, overload

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

Member = TypeVar("Member")


class WeakIdSet(MutableSet[Member]):
    """A set of weak references that compares its members by identity, never by ``==`` or hash.

    Python's ``WeakSet`` compares two references to the same object by ``==``. Modules such as tensordict's
    ``TensorDictParams`` would then compare their tensors element by element.
    """

    def __init__(self) -> None:
        self._members: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, value: Member) -> None:
        self._members[value] = None

    def discard(self, value: Member) -> None:
        if value in self._members:
            del self._members[value]


class _Weak(Sequence[Member]):
    """A sequence whose members are listed anew at each use."""

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> Member: ...

    @overload
    def __getitem__(self, index: slice) -> list[Member]: ...

    def __getitem__(self, index: int | slice) -> Member | list[Member]:
        return list(self)[index]


class WeakList(_Weak[Member]):
    """Weak references to objects, in order; those that were freed are not listed."""

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self._references: list[weakref.ref[Any]] = [weakref.ref(member) for member in members]

    def __iter__(self) -> Iterator[Member]:
        for reference in tuple(self._references):
            member = reference()
            if member is not None:
                yield member

    def append(self, member: Member) -> None:
        """Add an object at the end."""
        self._references.append(weakref.ref(member))

    def remove(self, member: object) -> None:
        """Remove an object by identity, where it is there; ``==`` of optimizers and modules may compare tensors."""
        self._references = [each for each in self._references if each() is not None and each() is not member]


class Models(_Weak[nn.Module]):
    """Weak references to models, in order.

    In the place of one that was freed are those of its parts that live on, the topmost ones: the children of a list of
    models that was made for the call of ``initialize``.
    """

    def __init__(self) -> None:
        # For each model it and all modules below it, each with the position of the module that it was found in.
        self._trees: list[list[tuple[weakref.ref[nn.Module], int]]] = []

    def append(self, model: nn.Module) -> None:
        """Add a model at the end."""
        modules, parents, seen = [model], [-1], {id(model)}
        for position, module in enumerate(modules):
            for child in module._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    modules.append(child)
                    parents.append(position)
        self._trees.append(list(zip(map(weakref.ref, modules), parents, strict=True)))

    def __iter__(self) -> Iterator[nn.Module]:
        for tree in self._trees:
            freed = {-1}
            for position, (reference, parent) in enumerate(tree):
                if parent not in freed:
                    continue
                module = reference()
                if module is None:
                    freed.add(position)
                    continue
                yield module
                if position == 0:
                    break


class OfModule:
    """Base class of objects that are stored on a module and refer to it weakly; copies of the module have none."""

    __slots__ = ("__weakref__", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The module.

        Raises:
            ReferenceError: it was freed, and a method of it was kept.
        """
        module = self._module()
        if module is None:
            raise ReferenceError(
                "this method is of a model of mpinit.initialize that was freed: keep the model as long as its methods"
            )
        return module


def weak_call(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a bound method, for as long as its object lives."""
    known = weakref.WeakMethod(method)

    def call() -> None:
        living = known()
        if living is not None:
            living()

    return call
