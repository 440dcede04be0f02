"""What scripts reach for on an initialised optimizer: ``_amp_stash`` and the methods around it."""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from .... import registry
from ....basics.dtypes import is_lower_precision
from ....masters.pairs import PairTable
from ....optimizer.control import OptimizerControl
from .scaler import LossScaler

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
        self._in_backward = False
        self.lazy_init_called = False
        self.already_patched = True
        self.params_have_scaled_gradients = False

    def control(self) -> OptimizerControl:
        """The session's record of the optimizer.

        Raises:
            RuntimeError: its session was undone.
        """
        optimizer = self._optimizer()
        session = registry.of(optimizer)
        if optimizer is None or session is None:
            raise RuntimeError("this optimizer is not initialised any more; call amp.initialize(...) for it again")
        return session.controller_of(optimizer)

    def _groups(self) -> list[Params]:
        return [group["params"] for group in self.control().optimizer.param_groups]

    def _pairs(self) -> PairTable:
        return self.control().groups.store.pairs

    def _weights_with_masters(self, params: Params) -> Params:
        pairs = (self._pairs().of(p) for p in params)
        return [pair.model_param for pair in pairs if pair is not None]

    def _masters(self, params: Params) -> Params:
        return [p for p in params if self._pairs().of(p) is not None]

    def _plain(self, params: Params, lower_precision: bool) -> Params:
        pairs = self._pairs()
        return [p for p in params if pairs.of(p) is None and is_lower_precision(p.dtype) == lower_precision]

    @property
    def fp16_groups(self) -> list[Params]:
        """16-bit weights, group by group."""
        return [self._weights_with_masters(params) + self._plain(params, True) for params in self._groups()]

    @property
    def fp32_from_fp16_groups(self) -> list[Params]:
        """Their masters, group by group."""
        return [self._masters(params) for params in self._groups()]

    @property
    def fp32_from_fp32_groups(self) -> list[Params]:
        """Float32 weights, which have no masters, group by group."""
        return [self._plain(params, False) for params in self._groups()]

    @property
    def all_fp16_params(self) -> Params:
        """16-bit weights."""
        return [p for group in self.fp16_groups for p in group]

    @property
    def all_fp32_from_fp16_params(self) -> Params:
        """Their masters, in the same order."""
        return [p for group in self.fp32_from_fp16_groups for p in group]

    @property
    def all_fp32_from_fp32_params(self) -> Params:
        """Float32 weights, which have no masters."""
        return [p for group in self.fp32_from_fp32_groups for p in group]

    @property
    def all_fp32_params(self) -> Params:
        """The same, under the name it has where there are no masters at all."""
        return self.all_fp32_from_fp32_params

    def before_backward(self) -> None:
        """Set gradients accumulated so far aside."""
        if not self._in_backward:
            self._in_backward = True
            self.control().backward.before_backward(self, self._scalers()[0])

    def after_backward(self, scaler: LossScaler | None) -> None:
        """Bring fresh gradients into the masters, unscaled and checked, onto those set aside."""
        core = self._scalers()[0] if scaler is None else scaler.core
        if not self._in_backward:
            raise RuntimeError("_post_amp_backward needs a _prepare_amp_backward before the backward pass")
        self._in_backward = False
        found_inf = self.control().backward.after_backward(core)
        if found_inf is not None:
            core.note(found_inf)
            if scaler is not None:
                scaler._has_overflow = bool(found_inf.item() > 0)

    def _scalers(self) -> list[Any]:
        session = registry.of(self._optimizer())
        return [] if session is None else session.scalers


def attach(optimizer: Optimizer) -> None:
    """Put ``_amp_stash`` and its methods on an optimizer; harmless where they are there already."""
    target: Any = optimizer
    target._amp_stash = AmpStash(optimizer)
    for name, function in _METHODS.items():
        setattr(target, name, types.MethodType(function, optimizer))


def _lazy_init(self: Any) -> None:
    self._amp_stash.lazy_init_called = True


def _lazy_init_masters(self: Any) -> None:
    """Masters are there since ``initialize``; groups added behind the optimizer's back get theirs."""
    self._amp_stash.control().groups.refresh()


def _prepare(self: Any) -> None:
    _lazy_init(self)
    self._amp_stash.before_backward()


def _post(self: Any, scaler: LossScaler | None = None) -> None:
    self._amp_stash.after_backward(scaler)


def _copy_back(self: Any) -> None:
    self._amp_stash.control().follow_masters()


_METHODS = {
    "_amp_lazy_init": _lazy_init,
    "_lazy_init_maybe_master_weights": _lazy_init_masters,
    "_prepare_amp_backward": _prepare,
    "_post_amp_backward": _post,
    "_master_params_to_model_params": _copy_back,
}
