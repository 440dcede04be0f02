"""Patches of a module of torch that may not be imported yet, and is not imported for them."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, final

from ..basics.patching import Undo

Wrap = Callable[[Callable[..., Any], ModuleType], Callable[..., Any]]


@final
class PatchesOnImport:
    """Functions of a module, wrapped as long as somebody needs it: at once, or as soon as the module is imported.

    Args:
        name: the module's.
        wrappers: function's name -> (the function, the module) -> what stands in its place. What the module does not
            have is left out.

    Example:
        >>> patches = PatchesOnImport("math", {"sqrt": lambda inner, module: lambda x: inner(x) + 1})
        >>> import math
        >>> patches.need("me"); math.sqrt(4)
        3.0
        >>> patches.need_no_more("me"); math.sqrt(4)
        2.0
    """

    def __init__(self, name: str, wrappers: Mapping[str, Wrap]) -> None:
        self._name = name
        self._wrappers = wrappers
        self._needed_by: set[Hashable] = set()
        self._reverts: list[Undo] = []
        # The garbage collector may say that one needs them no more while another asks for them.
        self._lock = threading.RLock()

    def need(self, who: Hashable) -> None:
        """Patch, if nobody has asked for it yet."""
        with self._lock:
            self._needed_by.add(who)
            if not self._reverts:
                self._patch_or_wait()

    def need_no_more(self, who: Hashable) -> None:
        """Take the patches away if nobody else needs them; harmless for one who does not."""
        with self._lock:
            self._needed_by.discard(who)
            while self._reverts and not self._needed_by:
                revert = self._reverts[-1]
                revert()
                # The collector may have come back here meanwhile, and have done it already.
                if self._reverts and self._reverts[-1] is revert:
                    self._reverts.pop()

    def _patch_or_wait(self) -> None:
        module = sys.modules.get(self._name)
        if module is not None:
            self._patch(module)
            return
        finder = _Finder(self._name, self._imported)
        self._reverts.append(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)
        sys.meta_path.insert(0, finder)

    def _imported(self, module: ModuleType) -> None:
        with self._lock:
            if self._needed_by:
                self._patch(module)

    def _patch(self, module: ModuleType) -> None:
        for name, wrap in self._wrappers.items():
            inner = getattr(module, name, None)
            if inner is not None:
                wrapper = functools.wraps(inner)(wrap(inner, module))
                self._reverts.append(functools.partial(_put_back, module, name, wrapper, inner))
                setattr(module, name, wrapper)


@final
class _Finder(MetaPathFinder):
    """Torch's own spec for one module, with a word when it has been loaded."""

    def __init__(self, name: str, loaded: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._loaded = loaded

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """None for any other module."""
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._loaded(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _put_back(module: ModuleType, name: str, wrapper: Any, inner: Any) -> None:
    # What somebody else has wrapped since stays, and hands through.
    if vars(module).get(name) is wrapper:
        setattr(module, name, inner)
