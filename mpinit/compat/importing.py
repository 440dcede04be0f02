"""Imports of the name ``apex``.

Every module under :data:`REPLACEMENT_PACKAGE` has two names: its own, and the one that scripts import. Both names are
one module object, so there is one copy of its state. Objects pickled under one name load under the other.
"""

import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

from ..basics.logs import log

NAME: Final = "apex"
REPLACEMENT_PACKAGE: Final = "mpinit.compat.apex"
BOOTSTRAP: Final = str(Path(__file__).with_name("bootstrap"))

# A directory with one of these is NVIDIA's package, not another project of the same name.
_REAL_PARTS: Final = ("optimizers", "normalization", "multi_tensor_apply", "contrib", "transformer", "parallel")


def install_as_apex() -> None:
    """Make ``import apex`` (``from apex import amp``, ...) import mpinit's replacement, in this process only.

    Call it before the first import of apex. A second call does nothing. No file is written.

    Where NVIDIA's apex is installed, only ``apex.amp`` is mpinit's; all other modules are NVIDIA's. An installed apex
    that cannot be imported is ignored, with a warning. Importing a name that mpinit does not provide raises an
    ImportError that names its replacement.

    Example:
        >>> import mpinit
        >>> mpinit.install_as_apex()
        >>> from apex import amp
        >>> amp.scale_loss.__module__.split(".")[0]
        'mpinit'
    """
    if not any(isinstance(finder, _Refusals) for finder in sys.meta_path):
        sys.meta_path.append(_Refusals())  # last: called for names that no other finder has
    package = sys.modules.get(NAME)
    if package is None:
        _import_real_apex() or _provide()
    elif package.__name__ != REPLACEMENT_PACKAGE:
        package.__dict__["amp"] = _provide(".amp")


def uninstall_apex() -> None:
    """Undo :func:`install_as_apex`: the next ``import apex`` imports what it did before."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Refusals)]
    _drop_modules(NAME)


class _Refusals(MetaPathFinder):
    """A finder that finds nothing: its errors name the replacement of a name of apex that mpinit does not provide."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raise an ImportError for a name with a known replacement.

        ``from apex.optimizers import FP16_Optimizer`` also calls it: a name that a package lacks may be a module in it.
        """
        name = fullname
        if fullname.startswith(REPLACEMENT_PACKAGE):
            name = NAME + fullname.removeprefix(REPLACEMENT_PACKAGE)
        if name in MISSING:
            raise ImportError(_refused(name), name=name)


def _drop_modules(package: str) -> None:
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        del sys.modules[name]


def _provide(part: str = "") -> ModuleType:
    """Register mpinit's modules under the name ``apex``, or a part of it such as ".amp"."""
    _drop_modules(NAME + part)
    face = importlib.import_module(REPLACEMENT_PACKAGE + part)
    names = [face.__name__, *(info.name for info in pkgutil.walk_packages(face.__path__, f"{face.__name__}."))]
    # All at once. A later import by the alias would bind the module in its parent, where ``apex.amp._amp_state`` must
    # stay the object of that name, not become the module.
    for name in names:
        sys.modules[NAME + name.removeprefix(REPLACEMENT_PACKAGE)] = importlib.import_module(name)
    return face


def _import_real_apex() -> bool:
    """Import an installed apex with mpinit's ``apex.amp``; return False where none can be imported."""
    spec = find_real_apex()
    if spec is None or spec.loader is None:
        return False
    package = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    # Before the package runs: it may import its own amp.
    package.__dict__["amp"] = _provide(".amp")
    try:
        spec.loader.exec_module(package)
    except Exception as error:
        # Most often it was built for another version of torch.
        log.warning("the installed apex cannot be imported (%s: %s) and is ignored", type(error).__name__, error)
        return False
    return True


def find_real_apex() -> ModuleSpec | None:
    """Return the spec of an installed NVIDIA apex, or None; run none of its code."""
    for finder in sys.meta_path:
        # The bootstrap directory has mpinit's own apex.py.
        path = [entry for entry in sys.path if entry != BOOTSTRAP] if finder is PathFinder else None
        spec = finder.find_spec(NAME, path)
        places = [] if spec is None else spec.submodule_search_locations or []
        if any(Path(place, part).is_dir() for place in places for part in _REAL_PARTS):
            return spec
    return None


_LEVEL_2: Final = "mpinit.initialize(model, optimizer, opt_level='O2')"
_OLD_SCALERS: Final = ("apex.fp16_utils.LossScaler", "apex.fp16_utils.DynamicLossScaler", "apex.fp16_utils.loss_scaler")

# Names and modules of apex that are refused -> their replacement.
MISSING: Final = {
    "apex.amp.lists": "mpinit.register_half_function and its siblings, one call for each function",
    **{
        f"apex.{package}.{name}": f"{_LEVEL_2}, mpinit.scale_loss and mpinit.clip_grad_norm_"
        for package in ("fp16_utils", "optimizers")
        for name in ("FP16_Optimizer", "fp16_optimizer")
    },
    **dict.fromkeys(
        _OLD_SCALERS, "torch.amp.GradScaler, or mpinit.initialize(..., loss_scale=...) and mpinit.scale_loss"
    ),
    "apex.optimizers.FusedMixedPrecisionLamb": f"apex.optimizers.FusedLAMB with {_LEVEL_2}",
    "apex.optimizers.FusedNovoGrad": (
        "timm.optim.NvNovoGrad, which is FusedNovoGrad(reg_inside_moment=True, bias_correction=False)"
    ),
    "apex.parallel.multiproc": "torchrun --nproc-per-node N -m mpinit run script.py",
}


@functools.cache
def _refused(name: str) -> str:
    """Return the error's text for a name, and log it once: scripts import apex in a ``try``, which hides the text."""
    text = f"{name} is not part of the apex that mpinit provides. In its place, {MISSING[name]}"
    log.warning("%s. A script may show another text for this ImportError", text)
    return text
