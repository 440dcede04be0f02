"""A weak set that compares its members by identity."""

from collections.abc import Iterable, Iterator, MutableSet
from typing import TypeVar

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

    def update(self, members: Iterable[Member]) -> None:
        for member in members:
            self.add(member)

    def difference_update(self, members: Iterable[Member]) -> None:
        for member in members:
            self.discard(member)
