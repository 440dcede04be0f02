"""A user's script, run as ``python path arguments...`` would run it, to its end or to its optimizers' first steps."""

import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..basics.wrappers import iter_unwrapped
from ..optimizer.members import parameters_of


def set_arguments(argv: Sequence[str], folder: Path) -> None:
    """Set ``sys.argv`` and the first entry of ``sys.path`` for what is about to run, as Python does."""
    sys.argv[:] = argv
    if not sys.flags.safe_path:
        sys.path[:1] = [str(folder.resolve())]  # replaces the directory of the mpinit command


class _FirstStepsError(BaseException):
    """The first steps are reached: no handler of ``Exception`` in the script stops it."""


def run_until_first_steps(path: str, arguments: Sequence[str]) -> tuple[nn.Module, list[Optimizer]]:
    """Run a script as ``python path arguments...`` does, until its optimizers' first steps.

    It ends before a step if all trainable parameters of the modules that ran have an optimizer then, and before the
    second step of an optimizer at the latest. What it prints goes to stderr.

    Returns:
        What the steps train, a model or several in an ``nn.ModuleDict``, and the optimizers.

    Raises:
        ValueError: there is no such file, the script ends without a step, or no module that ran has the optimizers'
            parameters.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r}; use a script's path, or pkg.mod:factory")
    # In the order of their first call: a model comes before its parts.
    called: dict[nn.Module, None] = {}
    stepping: dict[Optimizer, None] = {}

    def stops(optimizer: Optimizer, *_: Any) -> None:
        is_second = optimizer in stepping
        stepping.setdefault(optimizer)
        trained = {p for module in called for p in module.parameters() if p.requires_grad}
        if is_second or trained <= set(parameters_of(stepping)):
            raise _FirstStepsError

    hooks = [
        register_module_forward_pre_hook(lambda module, _: called.setdefault(module)),
        register_optimizer_step_pre_hook(stops),
    ]
    before = sys.argv[:], sys.path[:]
    set_arguments([path, *arguments], Path(path).parent)
    try:
        # Dynamo cannot trace the hook, and one iteration needs no compilation.
        with contextlib.redirect_stdout(sys.stderr), torch.compiler.set_stance("force_eager"):
            runpy.run_path(path, run_name="__main__")
    except _FirstStepsError:
        pass
    except SystemExit as ended:
        if ended.code:
            raise ValueError(f"{path} ended with {ended.code!r} before a step of an optimizer") from None
    finally:
        for hook in hooks:
            hook.remove()
        sys.argv[:], sys.path[:] = before
    if not stepping:
        raise ValueError(f"{path} ended without a step of a torch.optim.Optimizer: there is nothing to audit")
    return _model_of(list(stepping), list(called), path), list(stepping)


def _model_of(optimizers: Sequence[Optimizer], called: Sequence[nn.Module], path: str) -> nn.Module:
    """Return the module with the optimizers' parameters; several, as of a GAN, in a ModuleDict.

    Of several modules with the most of the parameters it is the first that was called.
    """
    missing, found = set(parameters_of(optimizers)), dict[str, nn.Module]()
    while any(counts := [len(missing.intersection(module.parameters())) for module in called]):
        *_, module = iter_unwrapped(called[counts.index(max(counts))])
        missing -= set(module.parameters())
        name = type(module).__name__
        found[name if name not in found else f"{name}_{len(found)}"] = module
    if not found:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(f"no module that {path} has called has a parameter of {names}")
    return next(iter(found.values())) if len(found) == 1 else nn.ModuleDict(found)
