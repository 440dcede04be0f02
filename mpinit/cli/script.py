"""A training script that runs until its optimizer's first step, which shows the model and optimizer that it trains."""

import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class _FirstStepError(BaseException):
    """The first step is reached: no handler of ``Exception`` in the script stops it."""


def is_script(spec: str) -> bool:
    """Return whether a word names a Python file, and no ``pkg.mod:factory``."""
    return spec.endswith(".py")


def pair_of_script(path: str, arguments: Sequence[str]) -> tuple[nn.Module, Optimizer]:
    """Run a script as ``python path arguments...`` does, until the first step, and return what that step trains.

    What it prints goes to stderr.

    Raises:
        ValueError: there is no such file, the script ends without a step, or no module that ran has the optimizer's
            parameters.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r}; use a script's path, or pkg.mod:factory")
    # In the order of their first call: a model comes before its parts.
    called: dict[nn.Module, None] = {}
    stepping: list[Optimizer] = []

    def called_first(module: nn.Module, _: Any) -> None:
        called.setdefault(module)

    def stops(optimizer: Optimizer, *_: Any) -> None:
        stepping.append(optimizer)
        raise _FirstStepError

    hooks = [register_module_forward_pre_hook(called_first), register_optimizer_step_pre_hook(stops)]
    before = sys.argv[:], sys.path[:]
    sys.argv[:] = [path, *arguments]
    sys.path[:1] = [str(Path(path).resolve().parent)]
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(_FirstStepError):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise ValueError(f"{path} ended with {ended.code!r} before a step of an optimizer") from None
    finally:
        for hook in hooks:
            hook.remove()
        sys.argv[:], sys.path[:] = before
    if not stepping:
        raise ValueError(f"{path} ended without a step of a torch.optim.Optimizer: there is nothing to audit")
    return _model_of(stepping[0], list(called), path), stepping[0]


def _model_of(optimizer: Optimizer, called: Sequence[nn.Module], path: str) -> nn.Module:
    """Return the module with the most of the optimizer's parameters; of several, the first that was called."""
    stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    counts = [len(stepped.intersection(module.parameters())) for module in called]
    if not any(counts):
        raise ValueError(f"no module that {path} has called has a parameter of {type(optimizer).__name__}")
    return called[counts.index(max(counts))]
