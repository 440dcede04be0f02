"""Whether an optimizer updates each parameter by itself, so that it can be stepped a few parameters at a time.

Of torch's own it is known. Any other is tried: a throwaway of the same class and options steps a few small parameters
together, and others of them alone and with other neighbours; everything it leaves must be the same to the bit.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..torch_internals.step_hooks import StepHooks
from .parts import Numbers

_PER_PARAMETER: Final = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)
# State of theirs that is a copy of the weights.
_COPIES: Final = {"ASGD": frozenset({"ax"})}
# What is known to look across parameters, whoever wrote it: tried, most would fail for want of a closure only.
_ACROSS: Final = ("LBFGS", "SAM", "GSAM", "WSAM", "BSAM", "Prodigy", "DAdapt", "PCGrad")

_STEPS: Final = 8
_LARGE: Final = 1000.0
_SIZES: Final = {
    0: ((), ()),
    1: ((5,), (7,)),
    2: ((4, 3), (3, 6)),
    3: ((3, 2, 4), (2, 3, 2)),
    4: ((3, 2, 3, 3), (2, 3, 1, 2)),
}


@dataclass(frozen=True)
class _Verdict:
    """Why an optimizer must not be stepped in parts, or None; which of its states are copies of weights.

    And whether it writes to gradients, or clears them, in its step.
    """

    reason: str | None
    copies: frozenset[str] = frozenset()
    writes_gradients: bool = False


# By class, options and device: trying takes some milliseconds.
_verdicts: Final[dict[Any, _Verdict]] = {}


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
    return _verdict_on(optimizer).copies


def writes_gradients(optimizer: Optimizer) -> bool:
    """Whether an optimizer may leave other gradients, or none, where its step found some.

    Example:
        >>> writes_gradients(torch.optim.ASGD([torch.ones(2)]))
        False
    """
    return bool(getattr(optimizer, "steps_per_parameter", False)) or _verdict_on(optimizer).writes_gradients


def _verdict_on(optimizer: Optimizer) -> _Verdict:
    known = _known(optimizer)
    if known is not None:
        return _Verdict(None, _COPIES.get(known, frozenset()))
    name = type(optimizer).__name__
    if any(name.startswith(other) for other in _ACROSS):
        return _Verdict("looks across parameters")
    key = (type(optimizer), *_options_of(optimizer))
    if key not in _verdicts:
        _verdicts[key] = _tried(optimizer)
    return _verdicts[key]


def _known(optimizer: Optimizer) -> str | None:
    """The name in torch.optim of what steps this optimizer, where it is one of those known."""
    step = inspect.unwrap(type(optimizer).step)
    for name in _PER_PARAMETER:
        cls = getattr(torch.optim, name, None)
        # torch wraps the step of a class when it is first made use of.
        if cls is not None and isinstance(optimizer, cls) and step is inspect.unwrap(cls.step):
            return name
    return None


# -- trying ---------------------------------------------------------------------------------------------------------


def _options_of(optimizer: Optimizer) -> tuple[Any, ...]:
    groups = [_options(group) for group in optimizer.param_groups]
    devices = {str(p.device) for group in optimizer.param_groups for p in group["params"]}
    return repr(optimizer.defaults), repr(list(dict.fromkeys(groups))), repr(_plain(vars(optimizer))), *sorted(devices)


def _options(group: dict[str, Any]) -> str:
    dimensions = sorted({p.dim() for p in group["params"]})
    return repr(({k: v for k, v in _plain(group).items() if not _counts(k, v)}, dimensions))


def _counts(key: str, value: Any) -> bool:
    """Whether an entry moves with every step or schedule: no option, and no reason to try again."""
    return key in ("lr", "initial_lr", "step", "k", "weight_sum", "lr_max", "scheduled_lr")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Entries that are numbers, names and tuples of them."""
    kinds = (bool, int, float, str, tuple, type(None))
    return {key: value for key, value in values.items() if isinstance(value, kinds) and not key.startswith("_")}


def _tried(optimizer: Optimizer) -> _Verdict:
    state = random.getstate()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            return _try(optimizer)
    except Exception as error:
        first = str(error).partition("\n")[0]
        return _Verdict(f"is not known to update each parameter by itself, and could not be tried ({first})")
    finally:
        random.setstate(state)


def _try(optimizer: Optimizer) -> _Verdict:
    together, writes = _run(optimizer, lambda parameters: [parameters])
    alone, _ = _run(optimizer, lambda parameters: [[parameter] for parameter in parameters])
    apart, _ = _run(optimizer, lambda parameters: [parameters[1::2], parameters[::2]])
    if not _same(together, alone) or not _same(together, apart):
        return _Verdict("looks across parameters: stepped alone and together they came out differently")
    throwaway, parameters = _throwaway(optimizer, _LARGE)
    _step(throwaway, [parameters], _gradients(parameters, 0))
    copies = {
        key
        for parameter in parameters
        for key, value in throwaway.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
        if bool(((value - parameter).abs() < 0.5 * _LARGE).all())
    }
    return _Verdict(None, frozenset(copies), writes)


def _throwaway(optimizer: Optimizer, offset: float = 0.0) -> tuple[Any, list[nn.Parameter]]:
    """An optimizer of the same class and options, on small parameters of as many dimensions."""
    generator = torch.Generator().manual_seed(1)
    groups, everything = [], []
    for group in optimizer.param_groups:
        parameters = []
        members = {(p.dim(), p.device): None for p in group["params"] if p.is_floating_point()}
        for dimensions, device in list(members)[:4]:
            for size in _SIZES.get(dimensions, ((2,) * dimensions, (1, 2) * dimensions)[:2])[:2]:
                size = tuple(size)[:dimensions]
                values = torch.randn(size, generator=generator) + offset
                parameters.append(nn.Parameter(values.to(device)))
        if parameters:
            groups.append({k: _own(v) for k, v in group.items() if k != "params"} | {"params": parameters})
            everything += parameters
        if len(groups) == 4:
            break
    accepted = inspect.signature(type(optimizer)).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    options = {k: _own(v) for k, v in optimizer.defaults.items() if takes_all or k in accepted}
    throwaway: Any = type(optimizer)(groups, **options)
    for key, value in _plain(vars(optimizer)).items():
        setattr(throwaway, key, value)
    if callable(getattr(throwaway, "train", None)):
        throwaway.train()
    return throwaway, everything


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _run(optimizer: Optimizer, parted: Any) -> tuple[list[Any], bool]:
    """What a throwaway leaves after a few steps in parts: its parameters, their state, and its groups' numbers.

    And whether it wrote to gradients.
    """
    throwaway, parameters = _throwaway(optimizer)
    wrote = [_step(throwaway, parted(parameters), _gradients(parameters, index)) for index in range(_STEPS)]
    left: list[Any] = [parameter.detach() for parameter in parameters]
    for parameter in parameters:
        left += _flat(throwaway.state.get(parameter, {}))
    return left + [_flat(_plain(group)) for group in throwaway.param_groups], any(wrote)


def _gradients(parameters: Sequence[nn.Parameter], index: int) -> list[torch.Tensor]:
    """Large ones and small ones, so that a norm or a rate of them all shows in each."""
    generator = torch.Generator().manual_seed(2 + index)
    scales = (3.0, 0.01, 0.3)
    return [
        (torch.randn(parameter.shape, generator=generator) * scales[(place + index) % 3]).to(parameter.device)
        for place, parameter in enumerate(parameters)
    ]


def _step(throwaway: Any, parts: Iterable[list[nn.Parameter]], gradients: list[torch.Tensor]) -> bool:
    """One step in parts; whether gradients are others afterwards."""
    wrote = False
    everything = [parameter for group in throwaway.param_groups for parameter in group["params"]]
    of = {id(parameter): gradient for parameter, gradient in zip(everything, gradients, strict=True)}
    numbers = Numbers(throwaway)
    for number, part in enumerate(parts):
        if number > 0:
            numbers.put_back()
        for parameter in everything:
            parameter.grad = None
        for parameter in part:
            parameter.grad = of[id(parameter)].clone()
        given = [parameter.grad for parameter in everything]
        versions = [None if gradient is None else gradient._version for gradient in given]
        with StepHooks(throwaway):
            throwaway.step()
        left = [parameter.grad for parameter in everything]
        wrote |= not all(map(is_, left, given))
        wrote |= versions != [None if gradient is None else gradient._version for gradient in left]
    return wrote


def _flat(value: Any) -> list[Any]:
    """Everything in a state, in order."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in (key, *_flat(value[key]))]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value.detach() if isinstance(value, torch.Tensor) else value]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    plain = (bool, int, float, str, type(None))
    return not isinstance(one, plain) or one == other
