"""Split masters: a float32 master is the bfloat16 weight and a 16-bit remainder, 2 bytes per parameter, exact.

Between steps a master has no memory of its own. A write to a weight replaces the upper half of its master, and the
remainder does not change. So the master differs from the written number by at most half a unit in the last place of
bfloat16, and nothing has to notice the write. A weight is its master rounded half away from zero; full masters round
half to even.
"""

from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import nn

from ..basics.bulk import are_same, data_ptrs, flat, layouts_of
from ..basics.dtypes import as_float32, is_lower_precision
from ..basics.modules import Names
from ..basics.running import is_faster_in_chunks, without_gradients
from ..distributed.sharding import (
    is_sharded,
    redistribute_like,
    set_all_local_data,
    set_data,
    shard,
    sharded_as,
)
from .arithmetic import Arithmetic
from .law import join, split
from .masters import Master, MasterBatch, Masters

# Float32 memory of up to this size is kept between steps: for small weights its layout needs more time than the step.
_KEPT_BYTES: Final = 16 * 2**20
# How many numbers are split or joined at a time: so that temporaries are small, and fit into a processor's cache. A
# compiled function has no temporaries, and starting it takes some time.
_PIECE: Final = 1 << 20
_CACHED: Final = 1 << 17


@final
class SplitMaster(Master):
    """A weight and its remainder.

    Attributes:
        remainder: the lower halves as int16, of the weight's shape and strides; of a sharded weight those of the local
            shard. None until the weight is cast.
    """

    __slots__ = ("remainder",)

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(weight, nn.Parameter(sharded_as(_placeholder(weight), weight), weight.requires_grad))
        self.remainder: torch.Tensor | None = None

    def laid_out(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the remainder with the weight's strides, on its device: ``model.to(...)`` may have changed them."""
        assert self.remainder is not None, "cast comes first"
        if self.remainder.device != weight.device or self.remainder.stride() != weight.stride():
            _check_dense(weight)
            self.remainder = torch.empty_like(weight, dtype=torch.int16).copy_(self.remainder)
        return self.remainder


@final
class SplitMasters(Masters):
    """The masters of ``master_weights="split"``.

    Attributes:
        buffers: device -> float32 memory that is kept from step to step.
        run: runs the arithmetic of steps.
    """

    steps_in_parts = True

    def __init__(self, names: Names | None = None, grad_dtype: torch.dtype | None = None) -> None:
        super().__init__(names, grad_dtype)
        self.buffers: dict[torch.device, torch.Tensor] = {}
        self.run = Arithmetic()

    def hand_out(self, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """List the weights: their masters are in memory only while a step runs."""
        return list(weights)

    def _follow_writes(self) -> None:
        self.check_data(self)

    def _make(self, weight: nn.Parameter) -> Master:
        _check_dense(shard(weight))
        return SplitMaster(weight)

    def _cast(self, masters: Sequence[Master]) -> None:
        for master in masters:
            assert isinstance(master, SplitMaster)
            incoming = shard(master.weight)
            if incoming.dtype == torch.bfloat16:
                master.remainder = torch.zeros_like(incoming, dtype=torch.int16)
                continue
            weight, remainder = (torch.empty_like(incoming, dtype=kind) for kind in (torch.bfloat16, torch.int16))
            _split(incoming, weight, remainder)
            # The weight is changed last, so that an interruption before leaves it as it was.
            master.remainder = remainder
            set_data(master.weight, sharded_as(weight, master.weight))

    @torch.no_grad()
    def values(self, master: Master) -> torch.Tensor:
        assert isinstance(master, SplitMaster)
        self.check_data([master])
        weight = shard(master.weight)
        if master.remainder is None:
            return sharded_as(weight.to(torch.float32, copy=True), master.weight)
        joined = torch.empty_like(weight, dtype=torch.float32)
        remainder = flat(master.laid_out(weight))
        for piece in zip(*map(_pieces, (flat(weight), remainder, flat(joined))), strict=True):
            join(*piece)
        return sharded_as(joined, master.weight)

    @torch.no_grad()
    def load(self, master: Master, values: torch.Tensor) -> None:
        assert isinstance(master, SplitMaster)
        weight = shard(master.weight)
        dense = torch.empty_like(weight, dtype=torch.float32)
        sharded_as(dense, master.weight).copy_(values)
        _split(dense, weight, master.laid_out(weight))

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
        self._layouts: object = None
        # The masters' remainders, which are parts of one tensor; and the memory of the weights in pieces: the first
        # number's place in the bucket, the size, and the tensors, of which several are small.
        self._parts: list[torch.Tensor] = []
        self._remainder = torch.empty(0, dtype=torch.int16, device="cpu")
        self._pieces: list[tuple[int, int, list[torch.Tensor]]] = []
        self._piece_size = 0
        self._placeholders: list[torch.Tensor] = []
        # The float32 memory of a step, and that of each master and each gradient in it.
        self._buffer: torch.Tensor | None = None
        self._values: list[torch.Tensor] = []
        self._spaces: list[torch.Tensor] = []

    def _shards(self) -> list[torch.Tensor]:
        return list(map(shard, self._weights)) if self._are_sharded else self._weights

    def _find_weights(self) -> None:
        """Find the memory of the weights and remainders, which may have changed since the last step.

        If two optimizers step one weight, the bucket of the other may have replaced its remainder.
        """
        shards, present = self._shards(), [master.remainder for master in self._masters]
        size = _piece_size(self._device, self._owner.run.is_compiled_on(self._device))
        if layouts_of(shards) == self._layouts and are_same(present, self._parts) and size == self._piece_size:
            return
        self._owner.check_data(self._owner)
        remainders = [m.laid_out(here) for m, here in zip(self._masters, shards, strict=True)]
        self._remainder = torch.cat(list(map(flat, remainders)))
        parts = self._remainder.split_with_sizes(self._sizes)
        self._parts = [part.as_strided(w.size(), w.stride()) for part, w in zip(parts, shards, strict=True)]
        for master, part in zip(self._masters, self._parts, strict=True):
            master.remainder = part
        # Detached: views of the weights themselves would keep these from being exchanged by swap_tensors.
        self._pieces = _in_pieces([flat(shard(weight)) for weight in shards], size)
        self._piece_size = size
        self._placeholders = list(map(_placeholder, self._weights))
        self._layouts, self._values = layouts_of(shards), []

    def _lay_out(self, buffer: torch.Tensor) -> None:
        if self._values and self._values[0].data_ptr() == buffer.data_ptr():
            return
        shards = self._shards()
        halves = buffer[: self._numel], buffer[self._numel : 2 * self._numel]
        self._values, self._spaces = (
            [
                part.as_strided(w.size(), w.stride())
                for part, w in zip(half.split_with_sizes(self._sizes), shards, strict=True)
            ]
            for half in halves
        )

    @without_gradients
    def read(self) -> None:
        self._find_weights()
        buffer = self._owner.buffers.pop(self._device, None)
        if buffer is None or buffer.numel() < 2 * self._numel:
            buffer = torch.empty(2 * self._numel, dtype=torch.float32, device=self._device)
        self._buffer = buffer
        self._lay_out(buffer)
        remainder, run = self._remainder, self._owner.run
        for start, size, weights in self._pieces:
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            run(join, weight, remainder[start : start + size], buffer[start : start + size])
        set_all_local_data(self._parameters, self._values, self._are_sharded)

    @without_gradients
    def widened(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
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
            for start, size, weights in self._pieces:
                end = start + size
                whole = weights[0] if len(weights) == 1 else weights[0].new_empty(size)
                self._owner.run(split, buffer[start:end], whole, self._remainder[start:end])
                if len(weights) > 1:
                    torch._foreach_copy_(weights, list(whole.split_with_sizes([each.numel() for each in weights])))
        finally:
            set_all_local_data(self._parameters, self._placeholders, self._are_sharded)
        if buffer.nbytes <= _KEPT_BYTES:
            self._owner.buffers[self._device] = buffer
        else:
            self._values, self._spaces = [], []

    def _gather(self) -> None:
        """Copy masters whose memory an optimizer has replaced, by ``p.data = ...``, into the bucket."""
        present = list(map(shard, self._parameters)) if self._are_sharded else self._parameters
        if data_ptrs(present) == data_ptrs(self._values):
            return
        for value, laid_out in zip(present, self._values, strict=True):
            if value.data_ptr() != laid_out.data_ptr():
                laid_out.copy_(value)


def _piece_size(device: torch.device, is_compiled: bool = False) -> int:
    return _CACHED if is_faster_in_chunks(device) and not is_compiled else _PIECE


def _pieces(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return numbers.unsafe_split(_piece_size(numbers.device))


def _in_pieces(weights: Sequence[torch.Tensor], most: int) -> list[tuple[int, int, list[torch.Tensor]]]:
    """Divide the flat weights of a bucket into pieces: parts of a large weight, or some small ones.

    Small ones are copied once more.
    """
    found: list[tuple[int, int, list[torch.Tensor]]] = []
    end, room, alone = 0, 0, most // 4
    for weight in weights:
        for part in weight.unsafe_split(most):
            size = part.numel()
            if not found or size >= alone or size > room:
                found.append((end, size, [part]))
                room = most - size if size < alone else 0
            else:
                start, before, parts = found[-1]
                found[-1] = start, before + size, [*parts, part]
                room -= size
            end += size
    return found


def _split(values: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Split float32 values into a weight and a remainder; all are dense."""
    if values.stride() != weight.stride():
        values = torch.empty_like(weight, dtype=torch.float32).copy_(values)
    for piece, half, lower in zip(*map(_pieces, (flat(values), flat(weight), flat(remainder))), strict=True):
        split(piece.clone(), half, lower)


def _check_dense(weight: torch.Tensor) -> None:
    """Refuse a weight that does not fill its memory, in any order of dimensions."""
    if torch.empty_like(weight, device="meta").stride() != weight.stride():
        raise ValueError(
            f'master_weights="split" needs weights that fill their memory, and one of shape {tuple(weight.shape)} '
            "is a view with gaps; make it contiguous first, or use master_weights=True"
        )


def _placeholder(weight: Any) -> torch.Tensor:
    """Make the local part of a master between steps: of its shape and dtype, all nan, in the memory of one number."""
    return torch.full((), torch.nan, dtype=torch.float32, device=weight.device).expand(shard(weight).shape)
