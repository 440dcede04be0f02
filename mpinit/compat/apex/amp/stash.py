"""What scripts reach for on an initialised optimizer: ``_amp_stash`` and the methods around it."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ....basics.dtypes import is_lower_precision
from ... import _core

Params = list[nn.Parameter]


def _all_of(groups: str, doc: str) -> Any:
    return property(lambda self: list(chain(*getattr(self, groups))), doc=doc)


class AmpStash:
    """A live view of an optimizer's masters, under apex's names.

    Args:
        optimizer: the optimizer.

    Attributes:
        lazy_init_called: whether a loss was scaled for it yet; masters exist from ``initialize`` on.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.lazy_init_called = False

    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            RuntimeError: its session was undone.
        """
        optimizer = self._optimizer()
        if optimizer is None or _core.session_of(optimizer) is None:
            raise RuntimeError("this optimizer is not initialised any more; call amp.initialize(...) for it again")
        return optimizer

    def _groups(self, pick: Callable[[nn.Parameter, nn.Parameter], nn.Parameter | None]) -> list[Params]:
        picked = [[pick(*pair) for pair in group] for group in _core.groups_of(self.optimizer())]
        return [[each for each in group if each is not None] for group in picked]

    @property
    def fp16_groups(self) -> list[Params]:
        """16-bit weights, group by group."""
        return self._groups(lambda weight, _: weight if is_lower_precision(weight.dtype) else None)

    @property
    def fp32_from_fp16_groups(self) -> list[Params]:
        """Their masters, group by group."""
        return self._groups(lambda weight, master: None if master is weight else master)

    @property
    def fp32_from_fp32_groups(self) -> list[Params]:
        """Float32 weights, which have no masters, group by group."""
        return self._groups(lambda weight, _: None if is_lower_precision(weight.dtype) else weight)

    all_fp16_params = _all_of("fp16_groups", "16-bit weights.")
    all_fp32_from_fp16_params = _all_of("fp32_from_fp16_groups", "Their masters, in the same order.")
    all_fp32_from_fp32_params = _all_of("fp32_from_fp32_groups", "Float32 weights, which have no masters.")


def attach(optimizer: Optimizer) -> None:
    """Put ``_amp_stash`` and its methods on an optimizer; harmless where they are there already."""
    target: Any = optimizer
    target._amp_stash = AmpStash(optimizer)
    for name, function in _METHODS.items():
        setattr(target, name, types.MethodType(function, optimizer))


def _lazy_init(self: Any) -> None:
    """Masters are there since ``initialize``."""
    self._amp_stash.lazy_init_called = True


def _copy_back(self: Any) -> None:
    _core.masters_to_weights(self._amp_stash.optimizer())


_METHODS = {
    "_amp_lazy_init": _lazy_init,
    "_lazy_init_maybe_master_weights": lambda self: None,
    "_master_params_to_model_params": _copy_back,
}
