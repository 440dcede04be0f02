"""Full masters: for each 16-bit weight a float32 tensor of its own, 4 bytes a parameter.

Before a step they follow what was written to their weights. Where reading costs no wait for a device these are compared
with their masters, by the law; large ones with sums of what they were, which takes a sixth of the time. Elsewhere those
count whose version, in which torch counts writes, has changed, and those whose ``data`` was read: through that it
counts none.
"""

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..basics.dtypes import as_float32, cast_to
from ..distributed.sharding import arriving_gradient_dtype, is_sharded, local, set_data
from ..torch_internals.columns import addresses_of, versions_of
from ..torch_internals.parameter_data import TENSOR_DATA, TENSOR_DETACH, forget_all_data, forget_data, note_data
from ..torch_internals.running import is_read_freely
from .float_split import flat, is_dense
from .law import follow_weight, round_into
from .masters import Gradients, Master, Masters, OpenMasters

# Numbers of a weight up to which comparing several at once saves more than it costs to put them side by side.
_SMALL: Final = 1 << 12
# Words that are summed up together, of four numbers each.
_ROWS: Final = 127
_WORD: Final = 4


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
        now, before = None if master.noted is None else _noted(weight), master.noted
        if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor) and torch.equal(now, before):
            return
        if isinstance(now, int) and now == before and id(weight) not in self.accessed:
            return
        # Its version says whether the user has written to it, where it is given out.
        with _unsafe_preserve_version_counter(parameter):
            follow_weight(here, values)
        master.noted = now

    @torch.no_grad()
    def load(self, master: Master, values: torch.Tensor) -> None:
        if master.parameter.device != master.weight.device:
            self._follow(master)
        master.parameter.copy_(values)
        round_into(master.weight, master.parameter, master.clamps)
        master.noted = None
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
        return _Open(self, masters)


@final
class _Open(OpenMasters):
    def __init__(self, owner: FullMasters, masters: Sequence[Master]) -> None:
        self.members = frozenset(map(id, masters))
        self._owner = owner
        self._masters = list(masters)
        self._weights: list[torch.Tensor] = [master.weight for master in masters]
        self._parameters: list[torch.Tensor] = [master.parameter for master in masters]
        self._are_sharded = any(map(is_sharded, self._weights))
        # Those that are compared together, their weights' and their own numbers, and others; as of some addresses.
        self._small: list[Master] = []
        self._numbers: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._others: list[Master] = []
        self._addresses: list[int] = []

    @torch.no_grad()
    def read(self) -> None:
        for master in self._written():
            self._owner._follow(master)
        self._owner._open.append(self)

    def _written(self) -> list[Master]:
        """The masters whose weights may have been written to since these were rounded into them."""
        if self._are_sharded or self._divide():
            return self._masters
        small, accessed = self._small, self._owner.accessed
        if small:
            weights, values = map(torch.cat, self._numbers)
            if torch.equal(values.to(weights.dtype).view(torch.int64), weights.view(torch.int64)):
                small = []
        versions = versions_of([master.weight for master in self._others])
        others = zip(self._others, versions, strict=True)
        written = [m for m, now in others if not isinstance(m.noted, int) or m.noted != now or id(m.weight) in accessed]
        return [*small, *written]

    def _divide(self) -> bool:
        """Whether weights or masters are elsewhere than before."""
        addresses = addresses_of([*self._weights, *self._parameters])
        if addresses == self._addresses:
            return False
        self._addresses = addresses
        read = [m for m in self._masters if m.weight.numel() <= _SMALL and is_read_freely(m.weight.device)]
        read = [m for m in read if m.weight.is_contiguous() and m.parameter.is_contiguous()]
        self._small = [m for m in read if m.weight.dtype is read[0].weight.dtype]
        small = set(map(id, self._small))
        self._others = [master for master in self._masters if id(master) not in small]
        flat_weights = [flat(TENSOR_DETACH(master.weight)) for master in self._small]
        values = [flat(TENSOR_DETACH(master.parameter)) for master in self._small]
        missing = -sum(map(torch.Tensor.numel, values)) % _WORD
        for each in (flat_weights, values) if missing else ():
            each.append(each[0].new_zeros(missing))
        self._numbers = flat_weights, values
        for master in self._masters:
            master.noted = None
        return True

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
        for master in self._others:
            master.noted = _noted(master.weight)

    def stepped(self) -> None:
        for master in self._masters:
            master.noted = None

    def widened(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Weights take float32 gradients and no others, but among other processes."""
        first = self._weights[0] if self._weights else None
        if first is None or first.grad_dtype is torch.float32:
            return list(gradients)
        return self._owner.held(gradients)


def _noted(weight: torch.Tensor) -> torch.Tensor | int | None:
    """By what writes to a weight are noticed: its version; sums of 64-bit words where it is read freely; or nothing.

    A write that moves words about leaves the sums as they are only where it moves each by a multiple of a prime number.
    """
    if not is_read_freely(weight.device):
        return weight._version
    if weight.numel() <= _SMALL:
        return None
    values: torch.Tensor = TENSOR_DETACH(weight)
    bits = (flat(values) if is_dense(values) else values.reshape(-1)).view(torch.int16)
    if bits.storage_offset() % _WORD:
        bits = bits.clone()
    end = bits.numel() // _WORD * _WORD
    words = bits[:end].view(torch.int64)
    # None of the weight's sizes is a multiple of the prime, so that no two of its slices share all their columns.
    columns = min(_prime_from(max(words.numel() // _ROWS, *(size + 1 for size in weight.shape))), words.numel())
    whole = words.numel() // columns * columns
    return torch.cat((words[:whole].view(-1, columns).sum(0), words[whole:], bits[end:].to(torch.int64)))


@functools.cache
def _prime_from(number: int) -> int:
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number
