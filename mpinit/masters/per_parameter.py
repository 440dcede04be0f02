"""Whether an optimizer updates each parameter by itself, so that it can be stepped a few parameters at a time.

Of torch's own it is known. Any other is tried: a throwaway of the same class and options steps a few small parameters
together and apart.
"""

from __future__ import annotations

import inspect
import os
from itertools import takewhile
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from .options import options_of
from .throwaway import Verdict, tried

_PER_PARAMETER: Final = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)
# State of theirs that is a copy of the weights.
_COPIES: Final = {"ASGD": frozenset({"ax"})}
# What a class may do in a way of its own without touching its step, which is compared by itself.
_BESIDE_STEPS: Final = ("step", "add_param_group", "load_state_dict", "state_dict", "zero_grad")
# What is known to look across parameters, whoever wrote it: tried, most would fail for want of a closure only.
_ACROSS: Final = ("LBFGS", "SAM", "GSAM", "WSAM", "BSAM", "Prodigy", "DAdapt", "PCGrad")

# Where functions come from that may stand around an object's own step: schedulers' and compilers'.
_TRUSTED: Final = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, Path(__file__).parent))

# By class, options and device: trying takes some milliseconds.
_verdicts: Final[dict[Any, Verdict]] = {}
_latest: Final[WeakKeyDictionary[Optimizer, Verdict]] = WeakKeyDictionary()


def check_steps_its_groups(optimizer: Optimizer) -> None:
    """Refuse an optimizer that steps other parameters than those in its groups.

    Raises:
        ValueError: it does.
    """
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise ValueError(
            "ZeroRedundancyOptimizer steps an optimizer of its own over the model's 16-bit weights, and would leave "
            "float32 masters where they are. To shard masters and optimizer states over ranks call torch.distributed."
            "fsdp.fully_shard(model) before the optimizer is made (FSDP2), and give the optimizer inside it, without "
            'ZeroRedundancyOptimizer; or keep that, over float32 parameters, with master_weights="model" or '
            "opt_level='O1'"
        )


def check_steps_as_its_class(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose ``step`` was replaced on the object: what the new one does nobody has tried.

    Raises:
        ValueError: it was, and not by torch.
    """
    step = vars(optimizer).get("step")
    of_class = (type(optimizer).step, inspect.unwrap(type(optimizer).step))
    while step is not None:
        function = getattr(step, "__func__", step)
        code = getattr(function, "__code__", None)
        if function in of_class or getattr(optimizer, "steps_per_parameter", False):
            return
        if code is None or not code.co_filename.startswith(_TRUSTED):
            raise ValueError(
                f"step() of this {type(optimizer).__name__} was replaced on the object. It would be called for a "
                "bucket of parameters at a time, and may look across them, to clip gradients say. Replace it after "
                "initialize, or set optimizer.steps_per_parameter = True if it updates each parameter by itself"
            )
        step = getattr(function, "__wrapped__", None)


def check_steps_per_parameter(optimizer: Optimizer, what: str, instead: str) -> None:
    """Refuse an optimizer that cannot be stepped a few parameters at a time.

    Args:
        optimizer: the optimizer; left alone.
        what: the property that needs it, for the message.
        instead: what to ask for instead.

    Raises:
        ValueError: it looks across parameters, or cannot be tried.
    """
    if getattr(optimizer, "steps_per_parameter", False):
        return
    reason = _verdict_on(optimizer).reason
    if reason is not None:
        raise ValueError(
            f"{what} steps a bucket of parameters at a time, and {type(optimizer).__name__} {reason}. Use {instead}, "
            "or set optimizer.steps_per_parameter = True if it updates each parameter by itself and keeps nothing "
            "across parameters"
        )


def kept_states(optimizer: Optimizer) -> frozenset[str]:
    """Names of an optimizer's states that are copies of weights, whose low bits count like a master's.

    Example:
        >>> sorted(kept_states(torch.optim.ASGD([torch.ones(2)])))
        ['ax']
    """
    return _verdict_so_far(optimizer).copies


def writes_gradients(optimizer: Optimizer) -> bool:
    """Whether an optimizer may leave other gradients, or none, where its step found some.

    Example:
        >>> writes_gradients(torch.optim.ASGD([torch.ones(2)]))
        False
    """
    return bool(getattr(optimizer, "steps_per_parameter", False)) or _verdict_so_far(optimizer).writes_gradients


def _verdict_so_far(optimizer: Optimizer) -> Verdict:
    """The verdict when it was last asked whether the optimizer may be stepped in parts: what counts may move on."""
    verdict = _latest.get(optimizer)
    return _verdict_on(optimizer) if verdict is None else verdict


def _verdict_on(optimizer: Optimizer) -> Verdict:
    known = _known(optimizer)
    if known is not None:
        return Verdict(None, _COPIES.get(known, frozenset()))
    name = type(optimizer).__name__
    if any(name.startswith(other) for other in _ACROSS):
        return Verdict("looks across parameters")
    key = (type(optimizer), *options_of(optimizer))
    if key not in _verdicts:
        _verdicts[key] = tried(optimizer)
    _latest[optimizer] = _verdicts[key]
    return _verdicts[key]


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's, which need not be tried."""
    return _known(optimizer) is not None


def _known(optimizer: Optimizer) -> str | None:
    """The name in torch.optim of what steps this optimizer, where it is one of those known."""
    step = inspect.unwrap(type(optimizer).step)
    for name in _PER_PARAMETER:
        cls = getattr(torch.optim, name, None)
        # torch wraps the step of a class when it is first made use of.
        if cls is not None and isinstance(optimizer, cls) and step is inspect.unwrap(cls.step):
            return name if _steps_like(cls, type(optimizer)) else None
    return None


def _steps_like(cls: type[Optimizer], own: type[Optimizer]) -> bool:
    """Whether a class of torch's does all of another's step: what that calls may be somebody else's."""
    derived = takewhile(lambda other: other is not cls, own.__mro__)
    others = [vars(other) for other in derived if not other.__module__.startswith("torch.optim.")]
    names = {name for members in others for name, value in members.items() if callable(value)}
    return not any(hasattr(cls, name) for name in names if name not in _BESIDE_STEPS and not name.startswith("__"))
