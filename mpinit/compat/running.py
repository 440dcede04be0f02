"""Running a script or module as ``__main__`` with the name ``apex`` provided."""

import builtins
import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from .importing import BOOTSTRAP, install_as_apex


def run_script(path: str, arguments: Sequence[str]) -> int:
    """Run a file as ``python path arguments...`` would, with ``apex`` provided."""
    file = Path(path)
    if not file.exists():
        print(f"mpinit run: no such file: {path!r}", file=sys.stderr)
        return 2
    _prepare([path, *arguments], str(file.resolve().parent))
    if file.is_dir() or file.suffix in (".zip", ".pyz"):
        runpy.run_path(path, run_name="__main__")
        return 0
    with io.open_code(str(file.resolve())) as opened:
        source = opened.read()
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    # Never put back: exit handlers, threads and pickles of the script use this module after its last line.
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec"), main.__dict__)
    return 0


def run_module(name: str, arguments: Sequence[str]) -> int:
    """Run a module as ``python -m name arguments...`` would, with ``apex`` provided."""
    _prepare([name, *arguments], os.getcwd())
    reason = _why_not_runnable(name)
    if reason is not None:
        print(f"mpinit run: {reason}", file=sys.stderr)
        return 2
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def _why_not_runnable(name: str) -> str | None:
    """Return the reason that a module cannot be run as ``__main__``, in one line; None where it can."""
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            name = f"{name}.__main__"
            found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that a package of the user's imports
        name, found = error.name, None
    except ValueError:  # a name that is empty or begins with a dot
        found = None
    if found is not None:
        return None
    return f"there is no module {name!r}, neither installed nor in {os.getcwd()}; without -m the path of a script runs"


def _prepare(argv: list[str], first_on_path: str) -> None:
    sys.argv[:] = argv
    if not sys.flags.safe_path and sys.path:
        sys.path[0] = first_on_path  # replaces the directory of the mpinit command
    install_as_apex()
    # Processes that the script spawns inherit sys.path, but no import hooks.
    sys.path.insert(1, BOOTSTRAP)
