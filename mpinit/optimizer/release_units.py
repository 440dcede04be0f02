"""What gradient release steps at a time: a bucket of parameters, as if no other had a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from ..distributed.sharding import has_other_processes, is_sharded
from ..masters.buckets import grouped
from ..masters.per_parameter import check_steps_per_parameter
from ..masters.two_copies import NameOf, TwoCopies
from ..torch_internals.devices import bucket_bytes_at_most
from ..torch_internals.parameter_watching import TENSOR_GRAD
from . import release_texts as texts
from .parameter_groups import ParameterGroups


@final
class Unit:
    """Parameters that are stepped together, once the gradients of all of them have arrived.

    Args:
        groups: the optimizer's parameters.
        copies: those that have masters.
        plain: those that have none.

    Attributes:
        weights: the model's parameters that these are.
        arrived: those of them whose gradients have arrived in this pass, by id.
    """

    def __init__(self, groups: ParameterGroups, copies: TwoCopies, plain: Sequence[nn.Parameter]) -> None:
        self.copies = copies
        self.weights: list[torch.Tensor] = [*copies.weights, *plain]
        self.arrived: dict[int, torch.Tensor] = {}
        self._groups = groups
        self._awaited: set[int] = set()
        # Those that the last pass has brought nothing to, and those that this one has.
        self._absent: set[int] = set()
        self._came: set[int] = set()

    def begin(self) -> None:
        """A backward pass has begun."""
        self.arrived.clear()
        self._came.clear()
        self._awaited = {id(weight) for weight in self.weights if weight.requires_grad} - self._absent

    def end(self) -> None:
        """A backward pass is over: what it has not come to is not waited for in the next, and stepped if it comes."""
        self._absent = {id(weight) for weight in self.weights} - self._came

    def is_complete_with(self, weight: torch.Tensor) -> bool:
        """Whether with the gradient that has arrived on ``weight`` all are there that were waited for."""
        self.arrived[id(weight)] = weight
        self._came.add(id(weight))
        self._awaited.discard(id(weight))
        return not self._awaited

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block only those that have arrived have gradients, on both sides; afterwards they have none.

        Where the inside fails they keep them.

        Raises:
            RuntimeError: a master was given a gradient of its own before the backward pass.
        """
        groups, put = self._groups, TENSOR_GRAD.__set__
        mine = {id(pair.master_param) for pair in self.copies.pairs if id(pair.model_param) in self.arrived}
        mine |= self.arrived.keys()
        everyone = [*groups.copies.masters, *groups.plain, *self.copies.weights]
        others = [(each, each.grad) for each in everyone if each.grad is not None and id(each) not in mine]
        self._show()
        for each, _ in others:
            put(each, None)
        try:
            yield
            self.copies.put_gradients([None] * len(self.copies.pairs))
            for weight in self.arrived.values():
                put(weight, None)
        finally:
            for each, gradient in others:
                put(each, gradient)
        for pair in self.copies.pairs:
            pair.forget_before()
            groups.copies.note_one(pair)
        self.arrived.clear()

    def _show(self) -> None:
        pairs = [pair for pair in self.copies.pairs if id(pair.model_param) in self.arrived]
        gradients = [pair.model_param.grad for pair in pairs]
        watcher = self._groups.store.watcher
        for pair, gradient in zip(pairs, gradients, strict=True):
            master = pair.master_param
            if master.grad is not None and master.grad is not gradient and id(master) in watcher.assigned:
                raise RuntimeError(texts.MASTERS_OWN)
        for pair, held in zip(pairs, self._groups.store.as_held(gradients), strict=True):
            TENSOR_GRAD.__set__(pair.master_param, held)
            TENSOR_GRAD.__set__(pair.model_param, held)


def units_of(groups: ParameterGroups, bucket_bytes: int, name_of: NameOf) -> list[Unit]:
    """All parameters in the groups' order, as many together as are stepped at a time.

    Backward passes come to them last first; so a bucket is complete long before the pass is over.

    Args:
        groups: the optimizer's parameters.
        bucket_bytes: as much float32, of masters and their gradients, as a unit takes; at least one parameter.
        name_of: a weight's dotted name, for errors.
    """
    units = []
    for pairs in grouped(groups.copies.pairs, bucket_bytes):
        copies = TwoCopies(groups.store.watcher, groups.store.as_held, name_of)
        copies.hold(pairs)
        units.append(Unit(groups, copies, []))
    none = TwoCopies(groups.store.watcher, groups.store.as_held, name_of)
    return units + [Unit(groups, none, members) for members in _together(groups.plain, bucket_bytes)]


def _together(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    found: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        size = 8 * parameter.numel()
        if room < size or not found or found[-1][0].device != parameter.device:
            found.append([])
            room = bucket_bytes_at_most(parameter.device, bucket_bytes)
        found[-1].append(parameter)
        room -= size
    return found


def check_release(optimizers: Sequence[Optimizer], taken: set[int]) -> None:
    """Whether optimizers can be stepped inside of backward passes.

    Args:
        optimizers: those that come.
        taken: the ids of parameters that others step.

    Raises:
        ValueError: one of them cannot; the message says why and what to do.
    """
    held = set(taken)
    for optimizer in optimizers:
        check_steps_per_parameter(optimizer, "gradient_release=True", "gradient_release=False")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if has_other_processes() or any(map(is_sharded, parameters)):
            raise ValueError(texts.OTHER_PROCESSES)
        if held.intersection(map(id, parameters)):
            raise ValueError(f"some parameters are {texts.TWO_OPTIMIZERS}")
        held.update(map(id, parameters))
