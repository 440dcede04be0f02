"""What scripts reach for on an initialised optimizer: ``_amp_stash`` and the methods around it."""

from __future__ import annotations

import types
import weakref
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from ....basics.dtypes import is_lower_precision
from ... import _core

Params = list[torch.nn.Parameter]


class AmpStash:
    """A live view of an optimizer's masters, under apex's names.

    Args:
        optimizer: the optimizer.

    Attributes:
        lazy_init_called: whether a loss was scaled for it yet; masters exist from ``initialize`` on.
        params_have_scaled_gradients: kept for scripts that set it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.lazy_init_called = False
        self.already_patched = True
        self.params_have_scaled_gradients = False

    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            RuntimeError: its session was undone.
        """
        optimizer = self._optimizer()
        if optimizer is None or _core.session_of(optimizer) is None:
            raise RuntimeError("this optimizer is not initialised any more; call amp.initialize(...) for it again")
        return optimizer

    @property
    def fp16_groups(self) -> list[Params]:
        """16-bit weights, group by group."""
        groups = _core.groups_of(self.optimizer())
        return [[weight for weight, _ in group if is_lower_precision(weight.dtype)] for group in groups]

    @property
    def fp32_from_fp16_groups(self) -> list[Params]:
        """Their masters, group by group."""
        groups = _core.groups_of(self.optimizer())
        return [[master for weight, master in group if master is not weight] for group in groups]

    @property
    def fp32_from_fp32_groups(self) -> list[Params]:
        """Float32 weights, which have no masters, group by group."""
        groups = _core.groups_of(self.optimizer())
        return [[weight for weight, _ in group if not is_lower_precision(weight.dtype)] for group in groups]

    @property
    def all_fp16_params(self) -> Params:
        """16-bit weights."""
        return list(chain(*self.fp16_groups))

    @property
    def all_fp32_from_fp16_params(self) -> Params:
        """Their masters, in the same order."""
        return list(chain(*self.fp32_from_fp16_groups))

    @property
    def all_fp32_from_fp32_params(self) -> Params:
        """Float32 weights, which have no masters."""
        return list(chain(*self.fp32_from_fp32_groups))

    # The name that they have where there are no masters at all.
    all_fp32_params = all_fp32_from_fp32_params


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
