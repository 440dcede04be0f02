"""Names of a module that are imported when they are asked for: what takes long to import, or few need."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def found_later(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` (PEP 562): each name is imported once, and is then an attribute like any other."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module])
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return find
