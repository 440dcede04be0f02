"""Split masters: a float32 master is the bfloat16 weight and a 16-bit remainder, 2 bytes per parameter, exact.

Between steps a master has no memory of its own. The law of masters needs no comparison here: a write to a weight
replaces the upper half of its master, and the remainder does not change. So the master differs from the written number
by at most half a unit in the last place of bfloat16. A written 0 or infinity is exact. A weight is its master rounded
half away from zero; full masters round half to even.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import nn

from ..basics.dtypes import LOWER_PRECISION, as_float32, is_lower_precision
from ..basics.logs import warn_user
from ..basics.modules import Names
from ..distributed.sharding import (
    arriving_gradient_dtype,
    is_distributed,
    is_sharded,
    redistribute_like,
    set_all_local_data,
    set_data,
    shard,
    sharded_as,
)
from ..torch_internals.bulk import (
    are_plain,
    are_same,
    changed_versions,
    data_ptrs,
    grads_of,
    have_grads,
    in_pieces,
    layouts_of,
    some_of,
    versions_of,
)
from ..torch_internals.parameter_data import TENSOR_DETACH
from ..torch_internals.running import without_gradients
from .float_split import add_remainder_, flat, is_dense, split_off_remainder_
from .masters import Gradients, Master, MasterBatch, Masters

# Float32 memory of up to this size is kept between steps: for small weights its layout needs more time than the step.
_KEPT_BYTES: Final = 16 * 2**20
# How many weights are sampled to find gradients that another backward pass is about to add to.
_SAMPLES: Final = 4
_PASSES_TO_WARN_OF: Final = 16
# How many elements of a float32 tensor are split at a time.
_PIECE: Final = 1 << 20


@final
class SplitMaster(Master):
    """A weight and its remainder.

    Attributes:
        remainder: the lower halves as int16, in the order of the weight's memory; of a sharded weight only those of the
            local shard. None until the weight is cast.
        strides, address: the weight's strides and address when the remainder was last laid out.
    """

    __slots__ = ("address", "remainder", "strides")

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(weight, nn.Parameter(sharded_as(_placeholder(weight), weight), weight.requires_grad))
        self.remainder: torch.Tensor | None = None
        self.strides: tuple[int, ...] = ()
        self.address = 0

    def laid_out(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the remainder in the order of the weight's memory, on its device.

        If the weight has other strides over the same memory (a transposed view), the remainder stays as it is. If it
        has other memory (a copy in another layout), the remainder is permuted. If it has another shape, elements that
        are in both shapes keep their remainders.
        """
        remainder, before = self.remainder, self.parameter.shape
        assert remainder is not None, "cast comes first"
        if remainder.device != weight.device:
            remainder = remainder.to(weight.device)
        is_same_memory = weight.data_ptr() == self.address and weight.numel() == remainder.numel()
        shape = shard(self.parameter).shape
        if weight.shape != shape or weight.stride() != self.strides:
            _check_dense(weight)
            if not is_same_memory:
                old = remainder.as_strided(shape, self.strides, remainder.storage_offset())
                new = torch.zeros_like(weight, dtype=torch.int16)
                if len(shape) == weight.dim():
                    common = tuple(slice(min(ours, theirs)) for ours, theirs in zip(shape, weight.shape, strict=True))
                    new[common] = old[common]
                remainder = flat(new)
            self.strides = weight.stride()
            if before != self.weight.shape:
                set_data(self.parameter, sharded_as(_placeholder(self.weight), self.weight))
        self.remainder, self.address = remainder, weight.data_ptr()
        return remainder


@final
class SplitMasters(Masters):
    """The masters of ``master_weights="split"``; gradients are bfloat16, on the weights, and add up in float32.

    Attributes:
        gradient_dtype: float32 where gradients are to be float32 from the first backward pass on; None: autograd's.
        buffers: device -> float32 memory that is kept from step to step.
    """

    steps_in_parts = True

    def __init__(self, names: Names | None = None, gradient_dtype: torch.dtype | None = None) -> None:
        super().__init__(names)
        self.gradient_dtype = gradient_dtype
        self.buffers: dict[torch.device, torch.Tensor] = {}
        # The id of a master -> its weight's version when the two last agreed.
        self.versions: dict[int, int] = {}
        # The id of a master whose weight's data was replaced by float32 data -> the weight and the remainder before. If
        # the weight is restored after an evaluation, it gets its remainder back.
        self._earlier: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # The number of masters, their weights, and some of these that were sampled.
        self._samples: tuple[int, list[torch.Tensor], Sequence[torch.Tensor]] = 0, [], []
        # How many forwards since the last step found no gradient among the samples.
        self._misses = 0
        # The id of a sampled weight -> the gradient that the last step used, and its version.
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        # How many backward passes since the last step have added to bfloat16 gradients, and the id and the version of a
        # gradient before the last one.
        self._passes = 0
        self._last_pass = (0, 0)
        self._has_warned = False

    def _make(self, weight: nn.Parameter) -> Master:
        _check_dense(shard(weight))
        return SplitMaster(weight)

    def _discard(self, master: Master) -> None:
        self.versions.pop(id(master), None)
        self._earlier.pop(id(master), None)
        self._used.pop(id(master.weight), None)
        self._samples = 0, [], []

    def _cast(self, master: Master, dtype: torch.dtype) -> None:
        assert isinstance(master, SplitMaster)
        incoming = shard(master.weight)
        master.strides, master.address = incoming.stride(), incoming.data_ptr()
        if incoming.dtype == torch.bfloat16:
            master.remainder = torch.zeros(incoming.numel(), dtype=torch.int16, device=incoming.device)
            return
        weight = torch.empty_like(incoming, dtype=torch.bfloat16)
        remainder = torch.empty(incoming.numel(), dtype=torch.int16, device=incoming.device)
        _split(incoming, weight, remainder)
        # The weight is changed last, so that an interruption before leaves it as it was.
        master.remainder = remainder
        master.address = weight.data_ptr()
        set_data(master.weight, sharded_as(weight, master.weight))
        self.versions[id(master)] = shard(master.weight)._version

    @torch.no_grad()
    def _follow_memory(self, master: Master) -> None:
        assert isinstance(master, SplitMaster)
        weight, gradient = master.weight, master.weight.grad
        present = shard(weight)
        if present.dtype is torch.bfloat16:
            self._restore_remainder(master, present)
            return
        former = self.data_use.former.get(id(weight))
        if former is not None and shard(former).dtype is torch.bfloat16 and shard(former).shape == present.shape:
            before = shard(former)
            self._earlier.setdefault(id(master), (before, master.laid_out(before)))
        # Numbers of another dtype count, with float32's precision.
        narrow = torch.empty_like(present, dtype=torch.bfloat16)
        remainder = torch.empty(present.numel(), dtype=torch.int16, device=present.device)
        _split(present.float(), narrow, remainder)
        weight.grad = None
        set_data(weight, sharded_as(narrow, weight))
        if gradient is not None and gradient.shape == weight.shape:
            weight.grad = gradient
        master.remainder, master.strides, master.address = remainder, narrow.stride(), narrow.data_ptr()
        set_data(master.parameter, sharded_as(_placeholder(weight), weight))

    def _restore_remainder(self, master: SplitMaster, weight: torch.Tensor) -> None:
        """Lay the remainder out for new memory; numbers that were restored get the remainders that they had."""
        remainder = master.laid_out(weight)
        before, known = self._earlier.get(id(master), (weight, remainder))
        if before is weight or before.shape != weight.shape:
            return
        in_order = torch.empty_like(weight, dtype=torch.int16)
        in_order.copy_(known.as_strided(before.shape, before.stride(), known.storage_offset()))
        is_restored = flat(torch.empty_like(weight, dtype=torch.bool).copy_(before.to(weight.device) == weight))
        master.remainder = torch.where(is_restored, flat(in_order), remainder)

    def drop_earlier(self, masters: Sequence[Master]) -> None:
        """Drop the remainders from before an evaluation, because a step changes these masters."""
        for master in masters if self._earlier else ():
            self._earlier.pop(id(master), None)

    def is_cast(self, master: Master) -> bool:
        return isinstance(master, SplitMaster) and master.remainder is not None

    def set_gradient_dtype(self, master: Master) -> None:
        """Set the ``grad_dtype`` that was asked for, unless ranks exchange gradients; else autograd's default."""
        dtype = None if self.gradient_dtype is None else arriving_gradient_dtype()
        if master.weight.grad_dtype is not dtype:
            gradient, master.weight.grad = master.weight.grad, None
            master.weight.grad_dtype = dtype
            master.weight.grad = gradient if gradient is None or dtype is None else gradient.to(dtype)

    @torch.no_grad()
    def values(self, master: Master) -> torch.Tensor:
        assert isinstance(master, SplitMaster)
        weight = shard(master.weight) if master.is_sharded else TENSOR_DETACH(master.weight)
        joined: torch.Tensor = weight.to(torch.float32)
        remainder = master.remainder
        if (
            remainder is None
            or weight.data_ptr() != master.address
            or weight.stride() != master.strides
            or master.parameter.shape != master.weight.shape
            or self.versions.get(id(master)) != weight._version
            or id(master.weight) in self.data_use.touched
        ):
            remainder = self._present_remainder(master, weight)
        add_remainder_(joined.as_strided((joined.numel(),), (1,)), remainder)
        return sharded_as(joined, master.weight) if master.is_sharded else joined

    def _present_remainder(self, master: SplitMaster, weight: torch.Tensor) -> torch.Tensor:
        """Return the remainder that belongs to the weight's present numbers; it must not be written to."""
        remainder = master.laid_out(weight)
        if self.versions.get(id(master)) != weight._version or id(master.weight) in self.data_use.touched:
            remainder = remainder.masked_fill(_is_zero_or_inf(flat(weight)), 0)
        return remainder

    def have_remainders(self, masters: Sequence[Master]) -> bool:
        """Return whether no weight was written to since its remainder was computed, as far as torch counts writes."""
        weights: list[torch.Tensor] = [master.weight for master in masters]
        touched = self.data_use.touched
        if touched and not touched.isdisjoint(map(id, weights)):
            return False
        known = [self.versions.get(id(master), -1) for master in masters]
        return changed_versions(weights, known) is None

    def all_values(self, masters: Sequence[Master]) -> list[torch.Tensor]:
        """Return the :meth:`values` of several masters; those of small ones in as many operations as those of one."""
        found: dict[int, torch.Tensor] = {}
        for indices in in_pieces([master.weight for master in masters], (not master.is_sharded for master in masters)):
            group = [masters[index] for index in indices]
            several = self._values_together(group) if len(group) > 1 else list(map(self.values, group))
            found.update(zip(indices, several, strict=True))
        return [found[index] for index in range(len(masters))]

    @torch.no_grad()
    def _values_together(self, masters: Sequence[Master]) -> list[torch.Tensor]:
        weights: list[torch.Tensor] = [TENSOR_DETACH(master.weight) for master in masters]
        pairs = ((m, weight) for m, weight in zip(masters, weights, strict=True) if isinstance(m, SplitMaster))
        remainder = torch.cat([self._present_remainder(master, weight) for master, weight in pairs])
        joined = torch.empty(remainder.numel(), dtype=torch.float32, device=remainder.device)
        parts = joined.split_with_sizes([weight.numel() for weight in weights])
        torch._foreach_copy_(list(parts), list(map(flat, weights)))
        add_remainder_(joined, remainder)
        # Each in memory of its own: who keeps or saves one of them keeps no others.
        found = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
        torch._foreach_copy_(list(map(flat, found)), list(parts))
        return found

    @torch.no_grad()
    def load(self, master: Master, values: torch.Tensor) -> None:
        assert isinstance(master, SplitMaster)
        self._earlier.pop(id(master), None)
        weight = shard(master.weight)
        remainder = master.laid_out(weight)
        dense = torch.empty_like(weight, dtype=torch.float32)
        sharded_as(dense, master.weight).copy_(values)
        _split(dense, weight, remainder)
        self.versions[id(master)] = weight._version

    def in_kept_dtype(self, gradients: Gradients) -> list[torch.Tensor | None]:
        if self.gradient_dtype is not None:
            return [None if g is None else as_float32(g) for g in gradients]
        return [g.coalesce() if g is not None and g.is_sparse else g for g in gradients]

    # -- gradients of several backward passes ------------------------------------------------------------------------

    def widen_unused_gradients(self, has_gradients: bool = False) -> None:
        """Widen bfloat16 gradients that no step has used yet, so that another backward pass adds to them in float32.

        A sum in bfloat16 stops growing when the summand is less than half a unit in its last place. Only a few
        gradients are examined, because every forward of a model calls this. In a process group gradients stay bfloat16:
        they may be views of DistributedDataParallel's buckets, which have the weights' dtype.

        Args:
            has_gradients: whether some weight is known to have a gradient. Default False.
        """
        samples = self._sampled()
        gradients = [weight.grad for weight in samples]
        if all([gradient is None for gradient in gradients]):  # noqa: C419 (a generator costs more)
            # The first forward after a step finds none as a rule. If a later one finds none, others may have some.
            self._misses += 1
            if not (has_gradients or self._misses > 1) or not self._sample_again():
                return
            samples = self._sampled()
            gradients = [weight.grad for weight in samples]
        for weight, gradient in zip(samples, gradients, strict=True):
            if gradient is not None and self._is_unused(weight, gradient):
                if not is_distributed():
                    self.widen_gradients()
                elif is_lower_precision(gradient.dtype):
                    self._count_pass((id(gradient), gradient._version))
                return

    def _count_pass(self, gradient: tuple[int, int]) -> None:
        """Warn once of many backward passes whose gradients add up in bfloat16."""
        if gradient == self._last_pass:
            return  # the same pass: its forward and its scaled loss both call this
        self._last_pass = gradient
        self._passes += 1
        if self._passes == _PASSES_TO_WARN_OF - 1 and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"gradients of {_PASSES_TO_WARN_OF} backward passes or more are added up in bfloat16, in which a sum "
                "stops growing: in a process group split masters have gradients of the weights' dtype. Use "
                'master_weights="model", whose gradients are float32, or fewer passes a step'
            )

    @torch.no_grad()
    def widen_gradients(self) -> None:
        """Widen all bfloat16 gradients one after another, so that each is freed before the next is widened."""
        weights = self._all_weights()
        gradients = grads_of(weights)
        if weights and are_plain(gradients, weights[0].device):
            return  # all are float32 already, as from the third pass on
        narrow = [
            index
            for index, gradient in enumerate(gradients)
            if gradient is not None and gradient.dtype in LOWER_PRECISION
        ]
        for index in narrow:
            gradient, gradients[index] = gradients[index], None
            # A gradient that is a view of a buffer of the user's stays there.
            if gradient is not None and not gradient._is_view():
                weights[index].grad = as_float32(gradient)

    def gradients_used(self) -> None:
        """Record that a step has used the gradients, or was skipped for them."""
        self._passes = self._misses = 0
        if not have_grads(self._sampled()):
            self._sample_again()
        self._used = {
            id(weight): (weakref.ref(weight.grad), weight.grad._version)
            for weight in self._sampled()
            if weight.grad is not None
        }

    def _all_weights(self) -> list[torch.Tensor]:
        if self._samples[0] != len(self._of):
            weights: list[torch.Tensor] = [master.weight for master in self]
            self._samples = len(weights), weights, some_of(weights, _SAMPLES)
        return self._samples[1]

    def _sampled(self) -> Sequence[torch.Tensor]:
        """Return a few weights, which all require gradients."""
        weights = self._all_weights()
        samples = self._samples[2]
        if not all([weight.requires_grad for weight in samples]):  # noqa: C419 (a generator costs more)
            samples = some_of([weight for weight in weights if weight.requires_grad], _SAMPLES)
            self._samples = len(weights), weights, samples
        return samples

    def _sample_again(self) -> bool:
        """Sample weights that have gradients, because none of the sampled ones has; return whether there are any."""
        weights = self._all_weights()
        found = [weight for weight, gradient in zip(weights, grads_of(weights), strict=True) if gradient is not None]
        if found:
            self._samples = len(weights), weights, some_of(found, _SAMPLES)
        return bool(found)

    def _is_unused(self, weight: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Return whether no step has used a gradient, or it was cleared in place and added to since."""
        known = self._used.get(id(weight))
        return known is None or known[0]() is not gradient or gradient._version >= known[1] + 2

    def batch(self, masters: Sequence[Master], device: torch.device) -> MasterBatch:
        return _Bucket(self, [master for master in masters if isinstance(master, SplitMaster)], device)


@final
class _Bucket(MasterBatch):
    """Weights whose remainders are parts of one tensor, and float32 memory for their masters and gradients."""

    def __init__(self, owner: SplitMasters, masters: Sequence[SplitMaster], device: torch.device) -> None:
        self._owner = owner
        self._device = device
        self._masters = list(masters)
        self._weights: list[torch.Tensor] = [master.weight for master in masters]
        self._parameters: list[torch.Tensor] = [master.parameter for master in masters]
        self._are_sharded = any(map(is_sharded, self._weights))
        self._sizes = [shard(weight).numel() for weight in self._weights]
        self._numel = sum(self._sizes)
        self._placeholders = [_placeholder(weight) for weight in self._weights]
        self._layouts: object = None
        self._parts: list[torch.Tensor] = []
        # The weights' versions when they last agreed with their remainders.
        self._versions = [owner.versions.get(id(master), -1) for master in masters]
        self._flat: list[torch.Tensor] = []
        self._halves: list[torch.Tensor] = []
        self._remainder = torch.empty(0, dtype=torch.int16, device="cpu")
        self._buffer: torch.Tensor | None = None
        self._laid_out: torch.Tensor | None = None
        self._bits: list[torch.Tensor] = []
        self._wide: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._spaces: list[torch.Tensor] = []

    def _shards(self) -> list[torch.Tensor]:
        return list(map(shard, self._weights)) if self._are_sharded else self._weights

    def _find_weights(self) -> None:
        """Find the memory of the weights and remainders, which may have changed since the last step."""
        shards = self._shards()
        if layouts_of(shards) == self._layouts and self._has_remainders():
            return
        self._owner.follow_replaced_memory(self._masters)
        shards = self._shards()
        self._sizes = [each.numel() for each in shards]
        self._numel = sum(self._sizes)
        self._placeholders = list(map(_placeholder, self._weights))
        parts = [master.laid_out(shard(master.weight)) for master in self._masters]
        self._remainder = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int16, device=self._device)
        self._parts = list(self._remainder.split_with_sizes(self._sizes))
        for master, part in zip(self._masters, self._parts, strict=True):
            master.remainder = part
        self._flat = [flat(TENSOR_DETACH(weight)) for weight in shards]
        self._halves = [weight.view(torch.int16) for weight in self._flat]
        self._layouts, self._laid_out = layouts_of(shards), None

    def _has_remainders(self) -> bool:
        """Return whether the remainders are still parts of this bucket's tensor.

        If two optimizers step one weight, the bucket of the other may have replaced its remainder.
        """
        return are_same([master.remainder for master in self._masters], self._parts)

    def _lay_out(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        if self._laid_out is buffer:
            return
        parts, spaces = (
            buffer[begin : begin + self._numel].split_with_sizes(self._sizes) for begin in (0, self._numel)
        )
        shards = self._shards()
        self._values = [part.as_strided(w.size(), w.stride()) for part, w in zip(parts, shards, strict=True)]
        self._spaces = [space.as_strided(w.size(), w.stride()) for space, w in zip(spaces, shards, strict=True)]
        self._wide = list(parts)
        self._bits = [part.view(torch.int32) for part in parts]
        self._laid_out = buffer

    @without_gradients
    def follow_writes(self) -> None:
        """Clear the remainders of numbers that were written as 0 or inf, before an optimizer or native code steps."""
        self._find_weights()
        if self._owner.keeps_bits:
            return
        self._owner.drop_earlier(self._masters)
        touched = self._owner.data_use.touched
        is_touched = bool(touched) and not touched.isdisjoint(map(id, self._weights))
        if is_touched or changed_versions(self._shards(), self._versions) is not None:
            for weight, remainder in zip(self._flat, self._parts, strict=True):
                remainder.masked_fill_(_is_zero_or_inf(weight), 0)

    @without_gradients
    def read(self) -> None:
        self.follow_writes()
        buffer = self._owner.buffers.pop(self._device, None)
        if buffer is None or buffer.numel() < 2 * self._numel:
            buffer = torch.empty(2 * self._numel, dtype=torch.float32, device=self._device)
        self._lay_out(buffer)
        if self._flat:
            torch._foreach_copy_(self._wide, self._flat)
        add_remainder_(buffer[: self._numel], self._remainder)
        self._set_parameters(self._values)

    @without_gradients
    def widened(self, gradients: Gradients) -> list[torch.Tensor | None]:
        arrived = list(gradients)
        if self._are_sharded:
            arrived = [
                None if g is None else shard(redistribute_like(g, weight))
                for g, weight in zip(gradients, self._weights, strict=True)
            ]
        is_narrow = [g is not None and is_lower_precision(g.dtype) and not g.is_sparse for g in arrived]
        into = [space for space, narrow in zip(self._spaces, is_narrow, strict=True) if narrow]
        if into:
            torch._foreach_copy_(
                into, [g for g, narrow in zip(arrived, is_narrow, strict=True) if narrow and g is not None]
            )
        wide = [
            space if narrow else (None if gradient is None else as_float32(gradient))
            for space, gradient, narrow in zip(self._spaces, arrived, is_narrow, strict=True)
        ]
        if self._are_sharded:
            wide = [None if g is None else sharded_as(g, w) for g, w in zip(wide, self._weights, strict=True)]
        return wide

    @without_gradients
    def write(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return  # a call that was interrupted has begun to write: a second one would split numbers again
        try:
            self._gather()
            before = self._remainder.clone() if self._owner.keeps_bits else None
            written = [] if before is None else self._written()
            split_off_remainder_(buffer[: self._numel].view(torch.int32), self._remainder)
            if before is not None:
                self._restore_written(before)
            if self._halves:
                torch._foreach_copy_(self._halves, self._bits)
            self._remember()
            for index in written:
                # Its remainder was kept, so a written 0 or inf still has to be found.
                self._versions[index] = self._owner.versions[id(self._masters[index])] = -1
        finally:
            self._set_parameters(self._placeholders)
        if buffer.nbytes <= _KEPT_BYTES:
            self._owner.buffers[self._device] = buffer
        else:
            self._laid_out = None
            self._bits, self._wide, self._values, self._spaces = [], [], [], []

    def _restore_written(self, before: torch.Tensor) -> None:
        """Restore the remainders of zeros and infinities that did not change while the masters were in use."""
        parts = before.split_with_sizes(self._sizes), self._bits
        for weight, half, remainder, kept, bits in zip(self._flat, self._halves, self._parts, *parts, strict=True):
            is_unchanged = _is_zero_or_inf(weight) & (half == bits)
            remainder.copy_(torch.where(is_unchanged, kept, remainder))

    def _written(self) -> list[int]:
        """Return the indices of the weights that were written to since they last agreed with their remainders."""
        versions, known = versions_of(self._shards()), self._owner.versions
        pairs = enumerate(zip(self._masters, versions, strict=True))
        return [index for index, (master, version) in pairs if known.get(id(master)) != version]

    def stepped(self) -> None:
        self._remember()

    def _remember(self) -> None:
        self._versions = versions_of(self._shards())
        self._owner.versions.update(zip(map(id, self._masters), self._versions, strict=True))

    def _set_parameters(self, values: list[torch.Tensor]) -> None:
        """Set the memory of the masters' parameters, which is a placeholder between steps."""
        set_all_local_data(self._parameters, values, self._are_sharded)

    def _gather(self) -> None:
        """Copy masters whose memory an optimizer has replaced, by ``p.data = ...``, into the bucket."""
        present = list(map(shard, self._parameters)) if self._are_sharded else self._parameters
        if data_ptrs(present) == data_ptrs(self._values):
            return
        for value, laid_out in zip(present, self._values, strict=True):
            if value.data_ptr() != laid_out.data_ptr():
                laid_out.copy_(value)


def _split(values: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Split float32 values into a weight and a remainder, a piece at a time.

    ``weight`` and ``remainder`` are dense, in the order of the weight's memory.
    """
    if values.stride() != weight.stride():
        values = torch.empty_like(weight, dtype=torch.float32).copy_(values)
    pieces = (each.unsafe_split(_PIECE) for each in (flat(values), flat(weight).view(torch.int16), remainder))
    for piece, half, rest in zip(*pieces, strict=True):
        bits = piece.to(torch.float32, copy=True).view(torch.int32)
        split_off_remainder_(bits, rest)
        half.copy_(bits)


def _is_zero_or_inf(weight: torch.Tensor) -> torch.Tensor:
    """Return a mask of 0 and inf: to these an old remainder would add more than half a unit in the last place."""
    return (weight == 0) | weight.isinf()


def _check_dense(weight: torch.Tensor) -> None:
    if not is_dense(weight):
        raise ValueError(
            f'master_weights="split" needs weights that fill their memory, and one of shape {tuple(weight.shape)} '
            "is a view with gaps; make it contiguous first, or use master_weights=True"
        )


def _placeholder(weight: Any) -> torch.Tensor:
    """Make the local part of a master between steps: of its shape and dtype, all nan, in the memory of one number."""
    return torch.full((), torch.nan, dtype=torch.float32, device=weight.device).expand(shard(weight).shape)
