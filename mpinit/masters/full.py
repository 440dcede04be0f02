"""Full masters: for each 16-bit weight a float32 tensor of its own, 4 bytes a parameter."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..basics.dtypes import as_float32, cast_to
from ..distributed.sharding import arriving_gradient_dtype, is_sharded, local, set_data
from ..torch_internals.parameter_data import TENSOR_DATA, TENSOR_DETACH, forget_all_data, forget_data, note_data
from .law import follow_weight, round_into
from .masters import Gradients, Master, Masters, OpenMasters
from .writes import Writes


@dataclass
class Given:
    """A master in the user's hands, and what it and its weight were when they were last looked at."""

    master: Master
    version: int = -1
    weight_version: int = -1
    gradient: torch.Tensor | None = None
    before: torch.Tensor | None = None  # the weight's bits, where reading costs no wait for a device


@final
class FullMasters(Masters):
    """The masters of ``master_weights=True``; gradients are float32, on the weights."""

    steps_in_parts = False

    def __init__(self) -> None:
        super().__init__()
        self.accessed: set[int] = set()
        # Also where a session is dropped without an undo.
        weakref.finalize(self, forget_all_data, self.accessed).atexit = False
        self.given: dict[int, Given] = {}
        self._open: list[_Open] = []
        self._columns: weakref.WeakSet[_Open] = weakref.WeakSet()

    def _make(self, weight: nn.Parameter) -> Master:
        # Not detach(): that would share the weight's version.
        return Master(weight, nn.Parameter(TENSOR_DATA.__get__(weight).to(torch.float32), weight.requires_grad))

    def _forget(self, master: Master) -> None:
        forget_data(master.weight)
        self.accessed.discard(id(master.weight))
        if id(master) in self.given:
            self.take_back(self.given[id(master)])

    def take_back(self, given: Given) -> None:
        forget_data(given.master.parameter)
        self.accessed.discard(id(given.master.parameter))
        del self.given[id(given.master)]

    def _cast(self, master: Master, dtype: torch.dtype) -> None:
        note_data(master.weight, self.accessed)
        set_data(master.weight, cast_to(dtype, master.clamps, TENSOR_DATA.__get__(master.weight)))

    def is_cast(self, master: Master) -> bool:
        """Whether the weight has been cast: until then it shares its memory with the master."""
        return master.weight.dtype != torch.float32

    def set_gradient_dtype(self, master: Master) -> None:
        """Float32; any, where ranks exchange gradients in the weights' type."""
        weight, gradient, dtype = master.weight, master.weight.grad, arriving_gradient_dtype()
        if weight.grad_dtype is not dtype:
            if gradient is not None:
                weight.grad = None
            weight.grad_dtype = dtype
            if gradient is not None:
                weight.grad = as_float32(gradient)

    @torch.no_grad()
    def values(self, master: Master) -> torch.Tensor:
        """The master itself, which follows its weight first."""
        is_open = self._open and any(id(master) in each.members for each in self._open)
        if not self.are_in_model and not is_open:
            self._follow(master)
        values: torch.Tensor = TENSOR_DETACH(master.parameter)
        return values

    def _follow(self, master: Master) -> None:
        weight, parameter = master.weight, master.parameter
        if parameter.device != weight.device:
            set_data(parameter, TENSOR_DATA.__get__(parameter).to(weight.device))
        if weight.dtype == torch.float32 or weight.is_meta:
            return  # not cast yet, or without numbers
        here: torch.Tensor = weight
        values = TENSOR_DETACH(parameter)
        if master.is_sharded:
            here, values = local(weight), local(values)
        # Its version says whether the user has written to it, where it is given out.
        with _unsafe_preserve_version_counter(parameter):
            if follow_weight(here, values):
                self._changed(master)

    def _changed(self, master: Master) -> None:
        """A master has new numbers: a weight that is what it was at the last step is not its rounding any more."""
        for columns in self._columns:
            if id(master) in columns.members:
                columns.stale[id(master)] = master

    @torch.no_grad()
    def load(self, master: Master, values: torch.Tensor) -> None:
        if master.parameter.device != master.weight.device:
            self._follow(master)
        master.parameter.copy_(values)
        round_into(master.weight, master.parameter, master.clamps)
        self._changed(master)
        self.clamp(master)

    @torch.no_grad()
    def clamp(self, master: Master) -> bool:
        """Whether a float16 weight, not known to be too narrow, has become infinite of a finite master.

        From here on it becomes the largest number of its type instead.
        """
        weight, parameter = local(master.weight), local(master.parameter)
        if master.clamps or weight.dtype != torch.float16 or not bool((weight.isinf() & parameter.isfinite()).any()):
            return False
        master.clamps = True
        round_into(master.weight, master.parameter, clamps=True)
        return True

    def held(self, gradients: Gradients) -> list[torch.Tensor | None]:
        return [None if gradient is None else as_float32(gradient) for gradient in gradients]

    def opened(self, masters: Sequence[Master], device: torch.device) -> OpenMasters:
        columns = _Open(self, masters)
        self._columns.add(columns)
        return columns


@final
class _Open(OpenMasters):
    def __init__(self, owner: FullMasters, masters: Sequence[Master]) -> None:
        self.members = frozenset(map(id, masters))
        self._owner = owner
        self._masters = list(masters)
        self._weights: list[torch.Tensor] = [master.weight for master in masters]
        self._parameters: list[torch.Tensor] = [master.parameter for master in masters]
        self._are_sharded = any(map(is_sharded, self._weights))
        self.stale: dict[int, Master] = {}
        self._writes = Writes([] if self._are_sharded else self._weights, owner.accessed)

    @torch.no_grad()
    def read(self) -> None:
        written = [*self.stale.values(), *(self._masters[place] for place in self._writes.found())]
        for master in self._masters if self._are_sharded else written:
            self._owner._follow(master)
        self._owner._open.append(self)

    @torch.no_grad()
    def write(self) -> None:
        if self in self._owner._open:
            self._owner._open.remove(self)
        if self._are_sharded:
            torch._foreach_copy_([local(w) for w in self._weights], [local(p) for p in self._parameters])
        elif self._weights:
            torch._foreach_copy_(self._weights, self._parameters)
        for master in self._masters:
            if master.clamps:
                round_into(master.weight, master.parameter, clamps=True)
        if not self._are_sharded:
            self._writes.note()
        self._tell_others()

    def stepped(self) -> None:
        """What weights are was not noted: all are looked at when they are read next."""
        self._writes.forget()
        self._tell_others()

    def _tell_others(self) -> None:
        self.stale.clear()
        for other in self._owner._columns:
            if other is not self and not other.members.isdisjoint(self.members):
                other.stale.update((id(master), master) for master in self._masters if id(master) in other.members)

    def widened(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Weights take float32 gradients and no others, but among other processes."""
        first = self._weights[0] if self._weights else None
        if first is None or first.grad_dtype is torch.float32:
            return list(gradients)
        return self._owner.held(gradients)
