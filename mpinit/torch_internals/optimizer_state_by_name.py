"""``torch.distributed.checkpoint.state_dict`` and optimizers that step masters: it is shown the model's weights.

The functions there name an optimizer's state after the parameters of the model that are in its groups, found by
identity. Masters are nobody's parameters, and the look-up ends in a KeyError. Here they are given a stand-in, whose
groups and state have weights in the places of masters; nothing of the optimizer itself is touched. What they do where
there is no state yet, a step at a learning rate of 0, is no step: nothing is counted, and no scaled loss is asked for.

Not a fault of torch, which has no word for masters: ``_get_optim_state_dict``, ``_load_optim_state_dict`` and
``_init_optim_state`` of torch/distributed/checkpoint/state_dict.py, alike in torch 2.11 to 2.13. It can go when these
ask an optimizer for the names of its parameters. FSDP1's own naming is left alone.

The module is not imported for it: that takes a tenth of a second, and prints a note on some systems. Whoever imports it
while there is an optimizer to be shown finds it patched, and it is unpatched with the last of them.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from ..basics.patching import Undo

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
_reverts: Final[list[Undo]] = []
_lock: Final = threading.RLock()  # the garbage collector may drop one while another is taken in


def show_weights(shown: ShownByWeights) -> Undo:
    """Let torch find an optimizer's state by the names of the model's weights; the optimizer is held weakly."""
    number, known = id(shown.optimizer), weakref.ref(shown)
    weakref.finalize(shown, _forget, number, known).atexit = False
    with _lock:
        _shown[number] = known
        if not _reverts:
            _await_module()
    return functools.partial(_forget, number, known)


def _forget(number: int, known: weakref.ref[ShownByWeights]) -> None:
    with _lock:
        if _shown.get(number) is known:
            del _shown[number]
        while _reverts and not _shown:
            _reverts[-1]()
            _reverts.pop()


def _shown_as(optimizer: Any) -> ShownByWeights | None:
    reference = _shown.get(id(optimizer))
    shown = None if reference is None else reference()
    return shown if shown is not None and shown.optimizer is optimizer else None


# -- the patches ------------------------------------------------------------------------------------------------------


def _await_module() -> None:
    module = sys.modules.get(MODULE)
    if module is not None:
        _patch(module)
        return
    finder = _Awaited()
    _reverts.append(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)
    sys.meta_path.insert(0, finder)


@final
class _Awaited(MetaPathFinder):
    """Has the module patched as soon as it has been loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Torch's own spec, for that one module."""
        spec = PathFinder.find_spec(name, path, target) if name == MODULE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            with _lock:
                if _shown:
                    _patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch(module: ModuleType) -> None:
    for name, wrap in _WRAPPERS.items():
        inner = getattr(module, name, None)
        if inner is None:
            continue
        wrapper = functools.wraps(inner)(wrap(inner, module))
        _reverts.append(functools.partial(_put_back, module, name, wrapper, inner))
        setattr(module, name, wrapper)


def _put_back(module: ModuleType, name: str, wrapper: Any, inner: Any) -> None:
    # What somebody else has wrapped since stays, and hands through.
    if vars(module).get(name) is wrapper:
        setattr(module, name, inner)


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


_WRAPPERS: Final[dict[str, Callable[[Callable[..., Any], ModuleType], Callable[..., Any]]]] = {
    "_get_optim_state_dict": _with_stand_ins,
    "_load_optim_state_dict": _with_stand_ins,
    "_init_optim_state": _without_effect,
}


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
