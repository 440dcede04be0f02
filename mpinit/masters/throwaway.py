"""A throwaway optimizer, tried: whether it updates each parameter by itself.

It steps a few small parameters together, and others of them alone and with other neighbours; everything it leaves must
be the same to the bit.
"""

from __future__ import annotations

import copy
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
from .options import options_of_group, plain
from .parts import Numbers

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
class Verdict:
    """Why an optimizer must not be stepped in parts, or None; which of its states are copies of weights.

    And whether it writes to gradients, or clears them, in its step.
    """

    reason: str | None
    copies: frozenset[str] = frozenset()
    writes_gradients: bool = False


def tried(optimizer: Optimizer) -> Verdict:
    """What a throwaway of an optimizer's class and options does; the optimizer is left alone."""
    state = random.getstate()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            return _try(optimizer)
    except Exception as error:
        first = str(error).partition("\n")[0]
        return Verdict(f"is not known to update each parameter by itself, and could not be tried ({first})")
    finally:
        random.setstate(state)


def _try(optimizer: Optimizer) -> Verdict:
    together, writes = _run(optimizer, lambda parameters: [parameters])
    alone, _ = _run(optimizer, lambda parameters: [[parameter] for parameter in parameters])
    apart, _ = _run(optimizer, lambda parameters: [parameters[1::2], parameters[::2]])
    if not _same(together, alone) or not _same(together, apart):
        return Verdict("looks across parameters: stepped alone and together they came out differently")
    throwaway, parameters = _throwaway(optimizer, _LARGE)
    _step(throwaway, [parameters], _gradients(parameters, 0))
    copies = {
        key
        for parameter in parameters
        for key, value in throwaway.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
        if bool(((value - parameter).abs() < 0.5 * _LARGE).all())
    }
    return Verdict(None, frozenset(copies), writes)


def _throwaway(optimizer: Optimizer, offset: float = 0.0) -> tuple[Any, list[nn.Parameter]]:
    """An optimizer of the same class and options, on small parameters of as many dimensions."""
    generator = torch.Generator().manual_seed(1)
    groups: list[dict[str, Any]] = []
    everything: list[nn.Parameter] = []
    seen: set[str] = set()
    for group in optimizer.param_groups:
        options = options_of_group(group)
        if len(groups) >= 4 and options in seen:
            continue
        seen.add(options)
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
    accepted = inspect.signature(type(optimizer)).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    given = {k: _own(v) for k, v in optimizer.defaults.items() if takes_all or k in accepted}
    throwaway: Any = type(optimizer)(groups, **given)
    for key, value in plain(vars(optimizer)).items():
        setattr(throwaway, key, value)
    if callable(getattr(throwaway, "train", None)):
        throwaway.train()
    return throwaway, everything


def _own(value: Any) -> Any:
    if isinstance(value, (list, dict, set)):
        return copy.deepcopy(value)
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
    return left + [_flat(plain(group)) for group in throwaway.param_groups], any(wrote)


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
