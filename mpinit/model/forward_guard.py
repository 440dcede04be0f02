"""The checks of a session before one of its models is called."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..distributed.replicas import reduce_in_float32, reduced_by, running_wrapper
from ..distributed.sharding import is_distributed, replaced_since
from .float32_values import Float32Values


class ForwardGuard:
    """The checks before a model of a session is called from outside of every forward.

    Attributes:
        models, masters: those of the session.
        joined: the DistributedDataParallel wrappers under which the ranks have agreed.
        older: the wrappers that are older than the session, under which no rank has stepped yet.
        changed: the ids of the parameters whose dtype the session has changed.
        has_float32_values: whether there are float32 values that users may write to.
        reduces_in_float32: whether DistributedDataParallel averages 16-bit gradients in float32.
    """

    has_float32_values = True
    reduces_in_float32 = False

    def __init__(self, models: Sequence[nn.Module], values: Float32Values, optimizers: Sequence[Optimizer]) -> None:
        self.models = models
        self.masters = values.masters
        self.joined: weakref.WeakSet[Any] = weakref.WeakSet()
        self.older: weakref.WeakSet[Any] = weakref.WeakSet()
        self.changed: set[int] = set()
        self._values = values
        self._optimizers = optimizers
        self._is_first = True

    def before_forward(self) -> None:
        """Apply pending writes, and check the wrapper that the model is called in.

        Raises:
            RuntimeError: the wrapper was made before ``mpinit.initialize``; or see :meth:`check_present`.
        """
        if self._is_first:
            self.check_present()
            self._is_first = False
        if is_distributed():
            # The process group may be newer than the session, and DDP's buckets have the weights' own dtype.
            first = next(iter(self.masters), None)
            if first is not None and first.weight.grad_dtype is not None:
                for master in self.masters:
                    self.masters.set_gradient_dtype(master)
            self._check_wrapper()
        if self.has_float32_values:
            self._values.apply_writes()

    def _check_wrapper(self) -> None:
        wrapper = running_wrapper()
        if self.reduces_in_float32 and wrapper is not None and wrapper in self.joined:
            reduce_in_float32(wrapper)
        if wrapper is None or wrapper in self.joined or wrapper in self.older:
            return
        if self.changed and any(id(parameter) in self.changed for parameter in reduced_by(wrapper)):
            name = type(wrapper).__name__
            raise RuntimeError(
                f"this {name} was made before mpinit.initialize, and has recorded the parameters' dtypes: it would not "
                "reduce the gradients of 16-bit weights, and every rank would train by itself. Call mpinit.initialize "
                f"first and wrap the model in {name} afterwards"
            )
        if self.has_some_of(wrapper):
            self.older.add(wrapper)

    def check_present(self) -> None:
        """Check that the models still have the parameters that they had in ``initialize``.

        Raises:
            RuntimeError: ``fully_shard`` or the like has replaced some, and steps would train nothing.
        """
        stepped: list[torch.Tensor] = [master.weight for master in self.masters]
        stepped += [p for each in self._optimizers for group in each.param_groups for p in group["params"]]
        named = [each for model in self.models for each in model.named_parameters()]
        fault = replaced_since(named, stepped)
        if fault:
            raise RuntimeError(fault)

    def parameters(self) -> dict[nn.Parameter, None]:
        """Return the models' parameters, each once."""
        return dict.fromkeys(parameter for model in self.models for parameter in model.parameters())

    def has_some_of(self, wrapper: Any) -> bool:
        """Return whether a DistributedDataParallel reduces gradients of the models."""
        return not self.parameters().keys().isdisjoint(reduced_by(wrapper))
