"""Functions of torch's that are other functions as long as somebody wants to know when they are called."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, final

from .patches_on_import import PatchesOnImport


@final
class Listeners:
    """Who wants to know, held weakly; torch has its own function back when nobody is left.

    Args:
        module: the name of the module where torch looks the function up at every call.
        function: its name there.
        wrap: (the function, the listeners) -> what stands in its place while anybody listens.

    Example:
        >>> listeners = Listeners("math", "sqrt", lambda inner, all: lambda x: [each(x) for each in all] and inner(x))
        >>> import math
        >>> listeners.add(print)
        >>> math.sqrt(4)
        4
        2.0
        >>> listeners.discard(print)
        >>> math.sqrt(4)
        2.0
    """

    def __init__(
        self, module: str, function: str, wrap: Callable[[Callable[..., Any], Iterable[Any]], Callable[..., Any]]
    ) -> None:
        def wrapper(inner: Callable[..., Any], _: ModuleType) -> Callable[..., Any]:
            return wrap(inner, self)

        self._patches = PatchesOnImport(module, {function: wrapper})
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._listeners))

    def add(self, listener: object) -> None:
        """As long as the listener lives, or until :meth:`discard`."""
        self._listeners.add(listener)
        self._patches.need(id(listener))
        weakref.finalize(listener, self._patches.need_no_more, id(listener))

    def discard(self, listener: object) -> None:
        """Harmless where it never listened."""
        self._listeners.discard(listener)
        self._patches.need_no_more(id(listener))
