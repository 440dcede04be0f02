"""Imports of the name ``apex``.

Every module under :data:`FACE` is reachable under two names, its own and the one a script expects, and is the same
object under both: state is never split, and what is pickled under one name loads under the other.
"""

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
FACE: Final = "mpinit.compat.apex"
BOOTSTRAP: Final = str(Path(__file__).with_name("bootstrap"))

# A directory that has one of these is NVIDIA's package and not another project of the same name.
_REAL_PARTS: Final = ("optimizers", "normalization", "multi_tensor_apply", "contrib", "transformer", "parallel")


def install_as_apex() -> None:
    """Make ``import apex`` (``from apex import amp``, ...) find mpinit's stand-in, in this process only.

    Call it before the first import of apex. Where a real apex is installed, ``apex.amp``, which it lacks or which no
    longer runs, is mpinit's, and everything else is its own; one that cannot be imported is left aside. Modules and
    names that are not covered are refused with what takes their place. Nothing is written anywhere; calling it twice
    does nothing more.

    Example:
        >>> import mpinit
        >>> mpinit.install_as_apex()
        >>> from apex import amp
        >>> amp.scale_loss.__module__.split(".")[0]
        'mpinit'
    """
    if not any(isinstance(finder, _Refusals) for finder in sys.meta_path):
        sys.meta_path.append(_Refusals())  # asked last, for what no other finder has
    package = sys.modules.get(NAME)
    if package is None:
        _import_real_apex() or _provide()
    elif package.__name__ != FACE:
        package.__dict__["amp"] = _provide(".amp")


def uninstall_apex() -> None:
    """Undo :func:`install_as_apex`: the name ``apex`` means again what it meant before."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Refusals)]
    _forget(NAME)


class _Refusals(MetaPathFinder):
    """Finds nothing; of apex's modules and names that something else takes the place of, it says what."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raise the ImportError, where there is more to say than that there is none.

        ``from apex.optimizers import FusedNovoGrad`` comes here too: a name that a package lacks may be a module in it.
        """
        refuse_missing(NAME + fullname.removeprefix(FACE) if fullname.startswith(FACE) else fullname)


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        del sys.modules[name]


def _provide(part: str = "") -> ModuleType:
    """Let ``apex``, or a part of it such as ".amp", and all modules inside be the stand-in's."""
    _forget(NAME + part)
    face = importlib.import_module(FACE + part)
    names = [face.__name__, *(info.name for info in pkgutil.walk_packages(face.__path__, f"{face.__name__}."))]
    # All at once: a module that is imported by its alias later would be bound in its parent, where
    # ``apex.amp._amp_state`` must stay the object that the parent made of that name.
    for name in names:
        sys.modules[NAME + name.removeprefix(FACE)] = importlib.import_module(name)
    return face


def _import_real_apex() -> bool:
    """Import an installed apex, with ``apex.amp`` ours; False where there is none that can be imported."""
    spec = find_real_apex()
    if spec is None or spec.loader is None:
        return False
    package = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    # Before it runs, and may import its own.
    package.__dict__["amp"] = _provide(".amp")
    try:
        spec.loader.exec_module(package)
    except Exception as error:
        # Most often, it was built for another torch.
        log.warning("the installed apex cannot be imported (%s: %s) and is left aside", type(error).__name__, error)
        return False
    return True


def find_real_apex() -> ModuleSpec | None:
    """The spec of an installed NVIDIA apex, or None; nothing is executed."""
    for finder in sys.meta_path:
        # The bootstrap directory would only find us again.
        path = [entry for entry in sys.path if entry != BOOTSTRAP] if finder is PathFinder else None
        spec = finder.find_spec(NAME, path)
        if spec is not None and _looks_real(spec):
            return spec
    return None


def _looks_real(spec: ModuleSpec) -> bool:
    places = spec.submodule_search_locations or ()
    return any(Path(place, part).is_dir() for place in places for part in _REAL_PARTS)


_LEVEL_2: Final = "mpinit.initialize(model, optimizer, opt_level='O2')"
_LEVEL_3: Final = "mpinit.initialize(model, opt_level='O3', keep_batchnorm_fp32=True) or model.half()"
_LAMB: Final = "timm.optim.Lamb, whose always_adapt is use_nvlamb here"
_NORMS: Final = "apex.normalization.fused_layer_norm"

MISSING: Final[dict[str, str]] = {
    "apex.amp.init": "amp.initialize(model, optimizer, opt_level='O1', num_losses=...), before the model is trained",
    "apex.amp.lists": "mpinit.register_half_function and its siblings, one call for each function",
    "apex.amp.opt": "amp.scale_loss(loss, optimizer, loss_id=...) for each loss",
    "apex.fp16_utils.convert_network": _LEVEL_3,
    "apex.fp16_utils.network_to_half": _LEVEL_3,
    "apex.fp16_utils.prep_param_lists": f"{_LEVEL_2} and mpinit.master_params(optimizer)",
    "apex.fp16_utils": f"{_LEVEL_2} for FP16_Optimizer, masters and loss scalers, model.half() for network_to_half",
    **dict.fromkeys(
        (f"{_NORMS}.fused_layer_norm", f"{_NORMS}.fused_layer_norm_affine"), "torch.nn.functional.layer_norm"
    ),
    **dict.fromkeys((f"{_NORMS}.fused_rms_norm", f"{_NORMS}.fused_rms_norm_affine"), "torch.nn.functional.rms_norm"),
    "apex.optimizers.FusedAdagrad": "torch.optim.Adagrad(fused=True)",
    "apex.optimizers.fused_adagrad": "torch.optim.Adagrad(fused=True)",
    "apex.optimizers.FusedLAMB": _LAMB,
    "apex.optimizers.fused_lamb": _LAMB,
    "apex.optimizers.FusedNovoGrad": "timm.optim.NvNovoGrad or torch.optim.AdamW",
    "apex.optimizers.fused_novograd": "timm.optim.NvNovoGrad or torch.optim.AdamW",
    "apex.parallel.LARC": "timm.optim.Lars(trust_clip=True), where the optimizer inside is SGD",
    "apex.parallel.Reducer": "torch.distributed.all_reduce of each gradient, divided by the number of processes",
    "apex.parallel.create_syncbn_process_group": "torch.distributed.new_subgroups(group_size)[0]",
}


def refuse_missing(name: str, kind: type[ImportError | AttributeError] = ImportError) -> None:
    """Raise the error of a name of apex that something else takes the place of."""
    if name in MISSING:
        raise kind(f"{name} is not part of the apex that mpinit provides. In its place, {MISSING[name]}", name=name)
