"""Full masters: for each 16-bit weight a float32 tensor of its own, 4 bytes per parameter.

Before a step masters follow writes to their weights, by the law of masters. A weight is compared with its master if its
version counter has changed. torch does not count writes through numpy or ``data``. On a CPU these are found by value:

- Small weights are compared with their masters, many in one call.
- For large weights the sums of their 64-bit words are compared with earlier sums. This reads 2 bytes per parameter, and
  the law reads 6. (For 16 million numbers: 0.6 ms instead of 7 ms, of an AdamW step of 49 ms.)

On other devices a comparison would need a device sync. There only the version counter, and uses of ``data``, count.
"""

import functools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Final, final

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..basics.dtypes import as_float32, cast_to
from ..basics.modules import Names
from ..distributed.sharding import arriving_gradient_dtype, is_sharded, local, set_data, sharded_as
from ..torch_internals.bulk import are_same, concatenated_bits, layouts_of, versions_of
from ..torch_internals.native_autocast import CastsOff
from ..torch_internals.parameter_data import TENSOR_DATA, TENSOR_DETACH
from ..torch_internals.running import reads_without_sync, without_gradients
from .float_split import flat, is_dense
from .law import meaning, round_into
from .masters import Gradients, Master, MasterBatch, Masters

# Weights of at most this many numbers are concatenated and compared in one call.
_SMALL: Final = 1 << 12
# How many 64-bit words are added to one sum, and how many 16-bit numbers a word has.
_ROWS: Final = 127
_WORD: Final = 4
# How many numbers are compared at a time, so that their cast stays in the CPU's cache.
_PIECE: Final = 1 << 18


@final
class FullMasters(Masters):
    """The masters of ``master_weights=True``; gradients are float32, on the weights.

    Attributes:
        handed_out: the ids of the masters that users have; see ``model/float32_values.py``.
    """

    steps_in_parts = False

    def __init__(self, names: Names | None = None) -> None:
        super().__init__(names)
        self.handed_out: set[int] = set()
        self._open: list[_Batch] = []
        # The id of a master that was set from its weight outside of a step -> its values before. If the weights are
        # restored after an evaluation, the masters get their lower bits back.
        self._earlier: dict[int, torch.Tensor] = {}
        self._all: _Batch | None = None

    def _make(self, weight: nn.Parameter) -> Master:
        # Not detach(), whose result would share the weight's version counter.
        values: torch.Tensor = TENSOR_DATA.__get__(weight)
        wide = values if values.dtype is torch.float32 else values.to(torch.float32)
        return Master(weight, nn.Parameter(wide, weight.requires_grad))

    def _discard(self, master: Master) -> None:
        self._earlier.pop(id(master), None)
        self.handed_out.discard(id(master))
        self._all = None

    def _cast(self, master: Master, dtype: torch.dtype) -> None:
        set_data(master.weight, cast_to(dtype, master.clamps, TENSOR_DATA.__get__(master.weight)))

    def is_cast(self, master: Master) -> bool:
        """Return whether the weight has been cast: until then it shares its memory with the master."""
        return master.weight.dtype != torch.float32

    def set_gradient_dtype(self, master: Master) -> None:
        """Set float32; in a process group any dtype, because DDP's gradients have the weights' dtype."""
        weight, gradient, dtype = master.weight, master.weight.grad, arriving_gradient_dtype()
        if weight.grad_dtype is not dtype:
            if gradient is not None:
                weight.grad = None
            weight.grad_dtype = dtype
            if gradient is not None:
                weight.grad = as_float32(gradient)

    @torch.no_grad()
    def _follow_memory(self, master: Master) -> None:
        weight, dtype = master.weight, master.dtype
        present, gradient = local(TENSOR_DATA.__get__(weight)), weight.grad
        values = local(TENSOR_DATA.__get__(master.parameter)).to(present.device)
        # Numbers that equal the rounding of both are those of a weight that was restored after an evaluation.
        earlier = self._earlier.pop(id(master), values).to(present.device)
        found = present.to(torch.float32, copy=True)
        common = tuple(slice(min(ours, theirs)) for ours, theirs in zip(present.shape, values.shape, strict=False))
        if present.dim() == values.dim() and present.numel():
            found[common] = meaning(present[common], earlier[common], values[common])
        set_data(master.parameter, sharded_as(found, weight))
        if present.dtype is not dtype:
            weight.grad = None
            set_data(weight, sharded_as(cast_to(dtype, master.clamps, found), weight))
        self.set_gradient_dtype(master)  # torch.utils.swap_tensors exchanges it, too
        if weight.grad is None and gradient is not None and gradient.shape == weight.shape:
            weight.grad = self.in_kept_dtype([gradient])[0]
        master.last_seen = None
        is_same = reads_without_sync(present.device) and torch.equal(found, earlier)
        if present.shape == earlier.shape and not is_same:
            self._earlier[id(master)] = earlier

    @torch.no_grad()
    def values(self, master: Master) -> torch.Tensor:
        """Return the master's own memory if its weight was not written to; otherwise a tensor computed by the law."""
        self._move(master)
        parameter: torch.Tensor = TENSOR_DETACH(master.parameter)
        if self.are_in_model or any(id(master) in each.members for each in self._open) or self._agrees(master):
            return parameter
        found = meaning(local(master.weight), local(parameter), self._earlier.get(id(master)))
        return sharded_as(found, master.weight) if master.is_sharded else found

    def _move(self, master: Master) -> None:
        if master.parameter.device != master.weight.device:
            set_data(master.parameter, TENSOR_DATA.__get__(master.parameter).to(master.weight.device))

    def _agrees(self, master: Master) -> bool:
        """Return whether a weight is known to be its master's rounding, without a device sync."""
        weight = master.weight
        if weight.dtype == torch.float32 or weight.is_meta:
            return True  # not cast yet, or without numbers
        now, before = _fingerprint(weight), master.last_seen
        if now is not None and before is not None and now[0] == before[0]:
            if now[1] is None or before[1] is None:
                return id(weight) not in self.data_use.touched
            if torch.equal(now[1], before[1]):
                return True
        here, values = local(weight), local(TENSOR_DETACH(master.parameter))
        if not (reads_without_sync(weight.device) and _is_rounded(here, values)):
            return False
        master.last_seen = now
        return True

    def _whole(self) -> "_Batch":
        """Return a batch of all masters; it is kept until masters are added or removed."""
        masters = list(self._of.values())
        if self._all is None or not are_same(masters, self._all.masters):
            self._all = _Batch(self, masters)
        return self._all

    @torch.no_grad()
    def agreeing(self) -> set[int]:
        """Return the ids of masters whose weights are known to be their roundings; small ones are compared together."""
        others = {id(master) for master in self._whole().written() if not self._agrees(master)}
        return {id(master) for master in self._of.values()} - others

    @torch.no_grad()
    def follow_all(self, keeps_bits: bool) -> None:
        """Call :meth:`follow` for every master, in bulk."""
        for master in self._whole().written():
            self.follow(master, keeps_bits)

    @torch.no_grad()
    def round_all(self) -> None:
        """Call :meth:`round` for every master, in bulk."""
        self._whole().round()

    @torch.no_grad()
    def follow(self, master: Master, keeps_bits: bool = False) -> None:
        """Apply writes to a weight to its master, in place, by the law of masters; outside of a step.

        Args:
            master: the master.
            keeps_bits: whether the weight may be restored before the next step, so that the master's present values
                have to be kept.
        """
        self._move(master)
        if not self._agrees(master):
            parameter = master.parameter
            here, values = local(master.weight), local(TENSOR_DETACH(parameter))
            found = meaning(here, values, self._earlier.get(id(master)))
            if keeps_bits:
                self._earlier.setdefault(id(master), values.clone())
            # A user may have the master, whose version shows whether the user has written to it.
            with _unsafe_preserve_version_counter(parameter):
                values.copy_(found)
            master.last_seen = _fingerprint(master.weight)
        if not keeps_bits:
            self._earlier.pop(id(master), None)

    def drop_earlier(self, masters: Sequence[Master]) -> None:
        """Drop the values that :meth:`follow` has kept, because a step changes these masters."""
        for master in masters if self._earlier else ():
            self._earlier.pop(id(master), None)

    @torch.no_grad()
    def round(self, master: Master) -> None:
        """Round a master into its weight, where the two differ."""
        weight, parameter = local(master.weight), local(master.parameter)
        if not (reads_without_sync(weight.device) and _is_rounded(weight, parameter)):
            round_into(master.weight, master.parameter, master.clamps)
        master.last_seen = _fingerprint(master.weight)

    @torch.no_grad()
    def load(self, master: Master, values: torch.Tensor) -> None:
        self._move(master)
        self._earlier.pop(id(master), None)
        if values is not master.parameter:
            master.parameter.copy_(values)
        round_into(master.weight, master.parameter, master.clamps)
        master.last_seen = None
        self.clamp(master)

    @torch.no_grad()
    def clamp(self, master: Master) -> bool:
        """Clamp a float16 weight that is infinite while its master is finite, now and after each later step.

        Returns:
            Whether it is clamped now and was not before.
        """
        weight, parameter = local(master.weight), local(master.parameter)
        if master.clamps or weight.dtype != torch.float16 or not bool((weight.isinf() & parameter.isfinite()).any()):
            return False
        master.clamps = True
        round_into(master.weight, master.parameter, clamps=True)
        return True

    @torch.no_grad()
    def clamp_all(self, masters: Iterable[Master]) -> list[Master]:
        """Call :meth:`clamp` for several masters, and return those for which it returned True.

        Weights are searched for inf and nan together, with one device sync per device.
        """
        found: dict[torch.device, list[Master]] = {}
        for master in masters:
            if not master.clamps and master.weight.dtype is torch.float16 and local(master.weight).numel():
                found.setdefault(master.weight.device, []).append(master)
        suspects: list[Master] = []
        for several in found.values():
            norms = torch.stack(torch._foreach_norm([local(master.weight) for master in several], math.inf))
            suspects += [m for m, is_finite in zip(several, norms.isfinite().tolist(), strict=True) if not is_finite]
        return [master for master in suspects if self.clamp(master)]

    def in_kept_dtype(self, gradients: Gradients) -> list[torch.Tensor | None]:
        return [None if gradient is None else as_float32(gradient) for gradient in gradients]

    @property
    def is_open(self) -> bool:
        """Return whether the groups of an optimizer contain masters at the moment, as in a step."""
        return bool(self._open)

    def opened(self, batch: "_Batch") -> None:
        """Record that the masters of a batch are in an optimizer's groups, until :meth:`closed`."""
        self._open.append(batch)

    def closed(self, batch: "_Batch") -> None:
        """Reverse :meth:`opened`."""
        if batch in self._open:
            self._open.remove(batch)

    def batch(self, masters: Sequence[Master], device: torch.device) -> MasterBatch:
        return _Batch(self, masters)


@final
class _Batch(MasterBatch):
    def __init__(self, owner: FullMasters, masters: Sequence[Master]) -> None:
        self.members = frozenset(map(id, masters))
        self.masters = list(masters)
        self._reference = weakref.ref(owner)
        self._weights: list[torch.Tensor] = [master.weight for master in masters]
        self._parameters: list[torch.Tensor] = [master.parameter for master in masters]
        self._are_sharded = any(map(is_sharded, self._weights))
        # Small weights, which are compared with their masters in one call; the memory of these weights and of their
        # masters; their numbers after the last step, if a user has one of the masters; and all other weights. All are
        # computed again when an address or a stride has changed.
        self._small: list[Master] = []
        self._numbers: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._small_before: torch.Tensor | None = None
        self._others: list[Master] = []
        self._both = [*self._weights, *self._parameters]
        self._layouts: object = None

    @property
    def _owner(self) -> FullMasters:
        owner = self._reference()
        assert owner is not None, "its masters were freed"
        return owner

    @without_gradients
    def follow_writes(self) -> None:
        written, keeps_bits = self.written(), self._owner.keeps_bits
        for master in written:
            self._owner.follow(master, keeps_bits)
        if not keeps_bits:
            self._owner.drop_earlier(self.masters)

    @without_gradients
    def read(self) -> None:
        self.follow_writes()
        self._owner.opened(self)

    def written(self) -> list[Master]:
        """List the masters whose weights may have been written to since the last rounding."""
        if self._are_sharded or self._was_moved():
            return self.masters
        touched = self._owner.data_use.touched
        small = self._differing_small()
        if small and self._small_before is not None:
            small = self._written_among(small)
        others = zip(self._others, versions_of([master.weight for master in self._others]), strict=True)
        written = [
            m
            for m, now in others
            if m.last_seen is None or m.last_seen[1] is not None or m.last_seen[0] != now or id(m.weight) in touched
        ]
        return [*small, *written]

    def _differing_small(self) -> list[Master]:
        """List the small masters if the weight of any is not its rounding."""
        weights, values = self._numbers
        if not weights:
            return []
        with CastsOff():  # autocast would promote the dtypes of cat()
            narrow, wide = torch.cat(weights), torch.cat(values)
        are_rounded = torch.equal(wide.to(narrow.dtype).view(torch.int64), narrow.view(torch.int64))
        return [] if are_rounded else self._small

    @torch.no_grad()
    def round(self) -> None:
        """Round masters into their weights where the two differ."""
        unmoved = not (self._are_sharded or self._was_moved())
        masters = [*self._differing_small(), *self._others] if unmoved else self.masters
        for master in self._rounded_together(masters):
            self._owner.round(master)

    def _rounded_together(self, masters: Sequence[Master]) -> list[Master]:
        """Round masters that could be compared with their weights only by a device sync; return the others."""
        found = [m for m in masters if not (m.clamps or m.is_sharded or reads_without_sync(m.weight.device))]
        if found:
            torch._foreach_copy_([master.weight for master in found], [master.parameter for master in found])
            for master in found:
                master.last_seen = _fingerprint(master.weight)
        done = set(map(id, found))
        return [master for master in masters if id(master) not in done]

    def _written_among(self, masters: list[Master]) -> list[Master]:
        """Return small masters, without those that a user has written to through numpy: there the master counts.

        Those are masters that a user has, of weights whose bits have not changed since the last step.
        """
        assert self._small_before is not None
        asked = set(map(id, masters))
        weights = concatenated_bits(self._numbers[0])
        sizes = [master.weight.numel() for master in self._small]
        sizes.append(len(weights) - sum(sizes))
        parts = (
            weights.split_with_sizes(sizes),
            self._small_before.split_with_sizes(sizes),
        )
        handed_out = self._owner.handed_out
        return [
            master
            for master, now, before in zip(self._small, *parts, strict=False)
            if id(master) in asked and (id(master) not in handed_out or not torch.equal(now, before))
        ]

    def _was_moved(self) -> bool:
        """Return whether a weight or master has other memory than before, and set up the batch for it."""
        if layouts_of(self._both) == self._layouts:
            return False
        has_been_set_up = self._layouts is not None
        self._owner.follow_replaced_memory(self.masters)
        self._layouts = layouts_of(self._both)
        read = [m for m in self.masters if m.weight.numel() <= _SMALL and reads_without_sync(m.weight.device)]
        read = [m for m in read if m.weight.is_contiguous() and m.parameter.is_contiguous()]
        self._small = [m for m in read if m.weight.dtype is read[0].weight.dtype]
        small = set(map(id, self._small))
        self._others = [master for master in self.masters if id(master) not in small]
        flat_weights = [flat(TENSOR_DETACH(master.weight)) for master in self._small]
        values = [flat(TENSOR_DETACH(master.parameter)) for master in self._small]
        missing = -sum(map(torch.Tensor.numel, values)) % _WORD
        for each in (flat_weights, values) if missing else ():
            each.append(each[0].new_zeros(missing))
        self._numbers = flat_weights, values
        self._small_before = None
        # A new batch has seen no address: follow_replaced_memory() has reset the weights that have other memory.
        for master in self.masters if has_been_set_up else ():
            master.last_seen = None
        return True

    @without_gradients
    def write(self) -> None:
        self._owner.closed(self)
        if self._are_sharded:
            torch._foreach_copy_([local(w) for w in self._weights], [local(p) for p in self._parameters])
        elif self._weights:
            torch._foreach_copy_(self._weights, self._parameters)
        for master in self.masters:
            if master.clamps:
                round_into(master.weight, master.parameter, clamps=True)
        for master in self._others:
            master.last_seen = _fingerprint(master.weight)
        self._remember_small()

    def stepped(self) -> None:
        self._owner.drop_earlier(self.masters)
        for master in self.masters:
            master.last_seen = None
        self._remember_small()

    def _remember_small(self) -> None:
        is_handed_out = self._small and not self.members.isdisjoint(self._owner.handed_out)
        self._small_before = concatenated_bits(self._numbers[0]) if is_handed_out else None

    def widened(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Return the gradients as they are, unless weights may have 16-bit gradients, as under DDP."""
        first = self._weights[0] if self._weights else None
        if first is None or first.grad_dtype is torch.float32:
            return list(gradients)
        return self._owner.in_kept_dtype(gradients)


def _is_rounded(weight: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether a weight is its master's rounding, a piece at a time; this is a device sync."""
    if values.numel() <= _PIECE or values.stride() != weight.stride() or not is_dense(weight):
        pieces: Iterable[tuple[torch.Tensor, torch.Tensor]] = ((weight, values),)
    else:
        pieces = zip(torch.split(flat(weight), _PIECE), torch.split(flat(values), _PIECE), strict=True)
    return all(torch.equal(wide.to(narrow.dtype), narrow) for narrow, wide in pieces)


def _version_of(weight: torch.Tensor) -> object:
    if is_sharded(weight):
        return weight._version, weight._local_tensor._version  # type: ignore[attr-defined]
    return weight._version


def _fingerprint(weight: torch.Tensor) -> tuple[object, torch.Tensor | None] | None:
    """Return a fingerprint that writes to a weight change: its version, and on a CPU the sums of columns of its words.

    The 64-bit words are laid out in columns, as many as a prime number. Words that change places change the sums,
    unless every word stays in its column.

    Returns:
        None for a small weight on a CPU, which is compared with its master.
    """
    if not reads_without_sync(weight.device):
        return _version_of(weight), None
    if weight.numel() <= _SMALL:
        return None
    values: torch.Tensor = local(TENSOR_DETACH(weight))
    bits = (flat(values) if is_dense(values) else values.reshape(-1)).view(torch.int16)
    if bits.storage_offset() % _WORD:
        bits = bits.clone()
    end = bits.numel() // _WORD * _WORD
    words = bits[:end].view(torch.int64)
    # The prime divides none of the weight's sizes, so that no two of its slices have the same columns.
    columns = min(_prime_from(max(words.numel() // _ROWS, *(size + 1 for size in weight.shape))), words.numel())
    whole = words.numel() // columns * columns
    sums = torch.cat((words[:whole].view(-1, columns).sum(0), words[whole:], bits[end:].to(torch.int64)))
    return _version_of(weight), sums


@functools.cache
def _prime_from(number: int) -> int:
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number
