"""The import hook that answers to the name ``apex``.

Every module under :data:`FACE` is reachable under two names, its own and the one a script expects, and is the same
object under both: state is never split, and what is pickled under one name loads under the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ..basics.logs import log
from .coverage import MISSING

NAME: Final = "apex"
FACE: Final = "mpinit.compat.apex"
BOOTSTRAP: Final = str(Path(__file__).with_name("bootstrap"))

# A directory that has one of these is NVIDIA's package and not another project of the same name.
_REAL_PARTS: Final = ("optimizers", "normalization", "multi_tensor_apply", "contrib", "transformer", "parallel")
# Its own amp no longer runs on current torch, and replacing it is what the caller asked for.
_ALWAYS_OURS: Final = "apex.amp"


def install_as_apex() -> None:
    """Make ``import apex`` (``from apex import amp``, ...) find mpinit's stand-in, in this process only.

    Where a real apex is installed, its own parts stay in use and only what it lacks, and always ``apex.amp``, is
    provided. Nothing is written anywhere; calling it twice does nothing more.

    Example:
        >>> install_as_apex()
        >>> from apex import amp
        >>> callable(amp.initialize)
        True
    """
    if not any(isinstance(finder, ApexFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, ApexFinder())
    already = sys.modules.get(NAME)
    if already is not None and already.__name__ != FACE:
        for name, module in list(sys.modules.items()):
            if _is_ours_always(name) and not module.__name__.startswith(FACE):
                del sys.modules[name]
            elif name.startswith(NAME + "."):
                _fill_module(module)
        _fill_package(already)


def uninstall_apex() -> None:
    """Undo :func:`install_as_apex`: the name ``apex`` means again what it meant before."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, ApexFinder)]
    for name in [name for name in sys.modules if name == NAME or name.startswith(NAME + ".")]:
        del sys.modules[name]


def find_real_apex() -> ModuleSpec | None:
    """The spec of an installed NVIDIA apex, or None; nothing is executed."""
    for finder in sys.meta_path:
        if isinstance(finder, ApexFinder):
            continue
        # The bootstrap directory would only find us again.
        path = [entry for entry in sys.path if entry != BOOTSTRAP] if finder is PathFinder else None
        spec = finder.find_spec(NAME, path)
        if spec is not None and _looks_real(spec):
            return spec
    return None


def _looks_real(spec: ModuleSpec) -> bool:
    places = spec.submodule_search_locations or ()
    return any(Path(place, part).is_dir() for place in places for part in _REAL_PARTS)


class ApexFinder(MetaPathFinder):
    """Finds ``apex`` and its submodules: a real package's own where it has them, the stand-in's otherwise.

    A name that neither has is not found here, so that importing it is a plain ModuleNotFoundError; where something
    takes its place, the error says what.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for ``apex`` and ``apex.*`` only; see the class."""
        if fullname != NAME and not fullname.startswith(NAME + "."):
            return None
        real = find_real_apex() if fullname == NAME else _real_submodule(fullname, path)
        if real is not None and not _is_ours_always(fullname):
            real.loader = _FillingLoader(real.loader) if real.loader is not None else None
            return real
        ours = _face_spec(fullname)
        if ours is None:
            if fullname in MISSING:
                raise ModuleNotFoundError(
                    f"{fullname} is not part of the apex that mpinit provides. In its place, {MISSING[fullname]}",
                    name=fullname,
                )
            return None
        spec = ModuleSpec(fullname, _AliasLoader(), origin=ours.origin, is_package=True)
        spec.submodule_search_locations = ours.submodule_search_locations
        return spec


def _is_ours_always(fullname: str) -> bool:
    return fullname == _ALWAYS_OURS or fullname.startswith(_ALWAYS_OURS + ".")


def _real_submodule(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """The real package's own submodule; the stand-in's directory is not a place to look for one."""
    parent = sys.modules.get(fullname.rpartition(".")[0])
    if path is None or (parent is not None and parent.__name__.startswith(FACE)):
        return None
    return PathFinder.find_spec(fullname, path)


def _face_name(fullname: str) -> str:
    return FACE + fullname.removeprefix(NAME)


def _face_spec(fullname: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(_face_name(fullname))
    except ModuleNotFoundError:
        return None


class _AliasLoader(Loader):
    """Loads ``apex.x`` by handing out the module that ``mpinit.compat.apex.x`` already is."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_face_name(spec.name))
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has put the alias' spec on the module; with it relative imports inside would warn.
        module.__spec__ = self._own_spec
        _alias_loaded_face_modules()


def _alias_loaded_face_modules() -> None:
    """Register the alias of every loaded part of the stand-in.

    Importing a submodule for the first time binds it in its parent. ``apex.amp._amp_state`` must stay the object that
    the parent made of that name, so the import system must not see its alias as a new submodule.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(FACE + "."):
            alias = NAME + name.removeprefix(FACE)
            top = ".".join(alias.split(".")[:2])
            if sys.modules.get(top) in (None, sys.modules.get(_face_name(top))) and _provided(top):
                sys.modules.setdefault(alias, module)


def _provided(top: str) -> bool:
    package = sys.modules.get(NAME)
    if package is None or package.__name__ == FACE or _is_ours_always(top):
        return True
    return _real_submodule(top, getattr(package, "__path__", None)) is None


class _FillingLoader(Loader):
    """Runs a real apex module, then adds the names that it lacks and the stand-in has."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ != NAME:
            self._inner.exec_module(module)
            _fill_module(module)
            return
        try:
            self._inner.exec_module(module)
        except Exception as error:
            _replace_broken(error)
        else:
            _fill_package(module)


def _replace_broken(error: Exception) -> None:
    """A real apex that cannot be imported, because it was built for another torch, must not stop the script."""
    log.warning("the installed apex cannot be imported (%s: %s) and is left aside", type(error).__name__, error)
    for name in [name for name in sys.modules if name.startswith(NAME + ".")]:
        del sys.modules[name]
    # The import system hands out what stands here when the loader returns.
    sys.modules[NAME] = importlib.import_module(FACE)
    _alias_loaded_face_modules()


def _fill_package(package: ModuleType) -> None:
    for part in importlib.import_module(FACE).__all__:
        if part == "amp" or not hasattr(package, part):
            setattr(package, part, importlib.import_module(f"{NAME}.{part}"))


def _fill_module(module: ModuleType) -> None:
    if _face_spec(module.__name__) is None:
        return
    face = importlib.import_module(_face_name(module.__name__))
    for name in getattr(face, "__all__", ()):
        if not hasattr(module, name):
            setattr(module, name, getattr(face, name))
