"""Buckets of encoded states: as many as are decoded together, and the memory for it.

A bucket's codes lie in one tensor of each kind, so that one call decodes all of it and one encodes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Final, final
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from ..torch_internals.allocator import storage_holders
from .codecs.codec import BLOCK
from .codecs.encoded import EncodedState

# A buffer up to this size stays from step to step.
_KEPT_BYTES: Final = 4 * 2**20


@final
class StateBucket:
    """Encoded states on one device; their codes become parts of the bucket's.

    Args:
        states: each once, of one codec.
    """

    def __init__(self, states: Sequence[EncodedState]) -> None:
        self.states = list(states)
        self.rows = [len(state.codes[0]) for state in states]
        self._codec = states[0].codec
        self._codes = self._codec.empty(sum(self.rows), states[0].device)
        self._open: torch.Tensor | None = None
        begin = 0
        for state, rows in zip(self.states, self.rows, strict=True):
            state.move(tuple(code[begin : begin + rows] for code in self._codes))
            begin += rows

    def holds(self, states: Sequence[EncodedState]) -> bool:
        """Whether these are its states, in this order."""
        return len(states) == len(self.states) and all(map(is_, states, self.states))

    def decode(self, buffer: torch.Tensor) -> dict[int, torch.Tensor]:
        """The numbers, in ``buffer`` (float32, (rows, BLOCK)), by the ids of states."""
        self._open = buffer
        self._codec.decode_(self._codes, buffer)
        return self._views()

    def _views(self) -> dict[int, torch.Tensor]:
        assert self._open is not None, "decode comes first"
        parts = self._open.split_with_sizes(self.rows)
        return {id(state): state.shaped(part) for state, part in zip(self.states, parts, strict=True)}

    def encode(self, written: Mapping[int, torch.Tensor]) -> None:
        """Encode what the numbers have become.

        Args:
            written: by the ids of states what is not in the buffer, perhaps.
        """
        views = self._views()
        assert self._open is not None
        for key, view in views.items():
            value = written.get(key)
            if value is not None and value.data_ptr() != view.data_ptr():
                view.copy_(value)
        self._codec.encode_(self._open, self._codes, self.rows)
        self._open = None


@final
class StateBuckets:
    """The buckets of a store's optimizers, and one buffer a device to decode them in."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Optimizer, dict[int, StateBucket]] = WeakKeyDictionary()
        self._used: dict[int, StateBucket] = {}
        self._buffers: dict[torch.device, tuple[torch.Tensor, int]] = {}

    def decode(
        self, optimizer: Optimizer, states: Sequence[EncodedState]
    ) -> tuple[list[StateBucket], dict[int, torch.Tensor]]:
        """Decode states together, as many buckets as there are devices.

        Returns:
            The buckets, to be encoded again, and the numbers by the ids of states.
        """
        by_device: dict[torch.device, list[EncodedState]] = {}
        for state in states:
            by_device.setdefault(state.device, []).append(state)
        buckets, numbers = [], {}
        for device, members in by_device.items():
            bucket = self._bucket_of(optimizer, members)
            numbers.update(bucket.decode(self._buffer(device, sum(bucket.rows))))
            buckets.append(bucket)
        return buckets, numbers

    def _bucket_of(self, optimizer: Optimizer, states: list[EncodedState]) -> StateBucket:
        known = self._known.setdefault(optimizer, {})
        bucket = known.get(id(states[0]))
        if bucket is None or not bucket.holds(states):
            bucket = known[id(states[0])] = StateBucket(states)
        self._used[id(states[0])] = bucket
        return bucket

    def _buffer(self, device: torch.device, rows: int) -> torch.Tensor:
        buffer, holders = self._buffers.pop(device, (None, 0))
        # An optimizer that keeps what it was given would see it change.
        if buffer is None or len(buffer) < rows or storage_holders(buffer) != holders:
            buffer = torch.empty(rows, BLOCK, dtype=torch.float32, device=device)
            holders = storage_holders(buffer)
        self._buffers[device] = buffer, holders
        return buffer[:rows]

    def end_step(self, optimizer: Optimizer) -> None:
        """Let go of large buffers, and of buckets that the step had no use for: their states may be gone."""
        self._known[optimizer] = self._used
        self._used = {}
        self._buffers = {
            device: (buffer, holders)
            for device, (buffer, holders) in self._buffers.items()
            if buffer.nbytes <= _KEPT_BYTES
        }

    def forget(self, optimizer: Optimizer) -> None:
        """Its states are others now."""
        self._known.pop(optimizer, None)
