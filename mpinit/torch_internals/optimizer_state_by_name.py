"""``torch.distributed.checkpoint.state_dict`` and optimizers that step masters: it is shown the model's weights.

The functions there name an optimizer's state after the parameters of the model that are in its groups, found by
identity. Masters are nobody's parameters, and the look-up ends in a KeyError. Here they are given a stand-in, whose
groups and state have weights in the places of masters; nothing of the optimizer itself is touched. What they do where
there is no state yet, a step at a learning rate of 0, is no step: nothing is counted, and no scaled loss is asked for.

Not a fault of torch, which has no word for masters: ``_get_optim_state_dict``, ``_load_optim_state_dict`` and
``_init_optim_state`` of torch/distributed/checkpoint/state_dict.py, alike in torch 2.11 to 2.13. It can go when these
ask an optimizer for the names of its parameters. FSDP1's own naming is left alone.

The module is not imported for it: that takes a tenth of a second, and prints a note on some systems.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from ..basics.patching import Undo
from .patches_on_import import PatchesOnImport

MODULE: Final = "torch.distributed.checkpoint.state_dict"


class ShownByWeights(ABC):
    """An optimizer, and whose place each of its parameters takes.

    Attributes:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @abstractmethod
    def weight_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The model's parameter that an entry of the groups is or stands for."""

    @abstractmethod
    def make_state(self, make: Callable[[Any], None]) -> None:
        """Have state made where there is none, by a step without effect.

        Args:
            make: torch's way of it. Takes what has ``state``, ``param_groups``, ``step`` and ``zero_grad``.
        """


_shown: Final[dict[int, weakref.ref[ShownByWeights]]] = {}


def show_weights(shown: ShownByWeights) -> Undo:
    """Let torch find an optimizer's state by the names of the model's weights; the optimizer is held weakly."""
    number, known = id(shown.optimizer), weakref.ref(shown)
    weakref.finalize(shown, _forget, number, known).atexit = False
    _shown[number] = known
    _PATCHES.need(known)
    return functools.partial(_forget, number, known)


def _forget(number: int, known: weakref.ref[ShownByWeights]) -> None:
    if _shown.get(number) is known:
        del _shown[number]
    _PATCHES.need_no_more(known)


def _shown_as(optimizer: Any) -> ShownByWeights | None:
    reference = _shown.get(id(optimizer))
    shown = None if reference is None else reference()
    return shown if shown is not None and shown.optimizer is optimizer else None


def _with_stand_ins(inner: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def wrapper(model: Any, optimizers: Sequence[Any], *rest: Any) -> Any:
        if not getattr(rest[-1], "fsdp_modules", None):
            known = [(optimizer, _shown_as(optimizer)) for optimizer in optimizers]
            optimizers = tuple(each if shown is None else _StandIn(shown, module) for each, shown in known)
        return inner(model, optimizers, *rest)

    return wrapper


def _without_effect(inner: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def wrapper(optimizer: Any) -> None:
        if isinstance(optimizer, _StandIn):
            optimizer.make_state(inner)
            return
        shown = _shown_as(optimizer)
        if shown is None:
            inner(optimizer)
        else:
            shown.make_state(inner)

    return wrapper


_PATCHES: Final = PatchesOnImport(
    MODULE,
    {
        "_get_optim_state_dict": _with_stand_ins,
        "_load_optim_state_dict": _with_stand_ins,
        "_init_optim_state": _without_effect,
    },
)


@final
class _StandIn:
    """An optimizer as its model knows it, to read; what is loaded goes to the optimizer itself."""

    def __init__(self, shown: ShownByWeights, module: ModuleType) -> None:
        self._shown = shown
        self._module: Any = module
        self.state: defaultdict[Any, Any] = defaultdict(dict)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Copies of the groups."""
        weight_of = self._shown.weight_of
        groups = self._shown.optimizer.param_groups
        return [group | {"params": [weight_of(parameter) for parameter in group["params"]]} for group in groups]

    def make_state(self, make: Callable[[Any], None]) -> None:
        """Have the optimizer's state made where there is none, and show it."""
        self._shown.make_state(make)
        weight_of = self._shown.weight_of
        self.state.clear()
        for key, state in self._shown.optimizer.state.items():
            self.state[weight_of(key) if isinstance(key, torch.Tensor) else key] = state

    def state_dict(self) -> Any:
        """The optimizer's."""
        return self._module._state_dict_fn(self._shown.optimizer, "state_dict")()

    def load_state_dict(self, state_dict: Any) -> None:
        """The optimizer's."""
        self._module._state_dict_fn(self._shown.optimizer, "load_state_dict")(state_dict=state_dict)
