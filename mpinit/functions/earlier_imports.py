"""``from torch import exp`` done before O1 began: the name is bound to the function without casts."""

import sys
import sysconfig
from collections.abc import Iterator, Mapping
from typing import Any, Final

# torch's own modules bind each other's functions all over: these are no early imports of a user's.
_OWN: Final = ("torch", "mpinit")
_INSTALLED: Final = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})


def bound_elsewhere(functions: Mapping[int, str], home: Any, *, users_only: bool) -> Iterator[tuple[str, str]]:
    """Find module globals that are one of these functions, known by id: ("module.name", what it is called).

    ``home`` is not looked into, nor, with ``users_only``, installed packages and the standard library.
    """
    for module_name, module in list(sys.modules.items()):
        if module is home or module_name.partition(".")[0] in _OWN or (users_only and _is_installed(module)):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in functions:
                yield f"{module_name}.{attribute}", functions[id(value)]


def _is_installed(module: Any) -> bool:
    path = getattr(module, "__file__", None)
    # __main__ has no file in an interactive session; any other module without one is built in.
    return path.startswith(_INSTALLED) if isinstance(path, str) else getattr(module, "__name__", "") != "__main__"
