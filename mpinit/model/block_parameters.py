"""The float32 parameters and buffers that replace 16-bit ones inside of ``float32_weights`` blocks."""

import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import torch
from torch import nn

from ..basics.modules import Names
from ..basics.patching import undo_when_dropped
from ..distributed.sharding import is_sharded, set_all_local_data, set_data, set_local_data, shard, sharded_as
from ..masters.masters import Master
from ..torch_internals.bulk import are_same, changed_grads, changed_versions, set_grads, versions_of
from ..torch_internals.parameter_data import (
    TENSOR_DATA,
    DataUse,
    record_data_use,
    stop_recording,
    stop_recording_all,
)

_KEPT_FROM_BLOCK: Final = (
    "the parameter {!r} that was kept from inside `with mpinit.float32_weights(...)` was written to after the block: "
    "it is empty there, and the write is lost. Use the parameter inside of the block, or the model's own after it"
)
_GRADIENT_AFTER_BLOCK: Final = (
    "a backward pass has computed a gradient of the parameter {!r} that was inside `with mpinit.float32_weights(...)`, "
    "after the block: it is not the model's own parameter, and empty there. Call backward() inside the block, or "
    "compute the loss after it. The gradient is dropped"
)
_KIND: Final = attrgetter("dtype", "device")


class BlockParameters:
    """Float32 parameters and buffers, one for each 16-bit tensor, which have numbers only inside of a block.

    After a block each is all nan, in the memory of one number. Weights with full masters need none of them: their
    masters replace them.

    Attributes:
        narrow: id of a float32 tensor, also of a full master -> the 16-bit tensor that it replaces inside a block.
    """

    def __init__(self) -> None:
        self.narrow: dict[int, torch.Tensor] = {}
        self._tensors: list[torch.Tensor] = []
        self._wide: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        self._tensor_of: dict[int, torch.Tensor] = {}
        self._empty: list[torch.Tensor] = []
        self._kinds: list[tuple[torch.dtype, torch.device]] = []
        self._are_sharded = False
        # Uses of the parameters' data since the last block.
        self._use = DataUse()
        undo_when_dropped(self, functools.partial(stop_recording_all, self._use))
        # The versions of the float32 tensors at the end of the last block; None inside of one.
        self._versions: list[int] | None = []
        # Float32 tensors whose 16-bit tensors have become float32 since: they share the memory of these.
        self._shared: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        # Float32 tensors that later blocks do not use: each with the 16-bit tensor and the version.
        self._former: list[tuple[weakref.ref[torch.Tensor], torch.Tensor, int]] = []

    def __len__(self) -> int:
        return len(self._wide) + len(self._former)

    def are_for(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether :meth:`arrange` was called for these tensors, with their present dtypes and devices."""
        return are_same(tensors, self._tensors) and list(map(_KIND, tensors)) == self._kinds

    def arrange(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a float32 tensor for each 16-bit one; between blocks.

        A tensor that had one before, and has the same dtype and device, has that one again. Others get an empty one.
        """
        kinds = list(map(_KIND, tensors))
        known = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        before = [known.get(id(tensor), -1) for tensor in tensors]
        before = [i if i >= 0 and self._kinds[i] == kind else -1 for i, kind in zip(before, kinds, strict=True)]
        blanks = iter(_emptied([shard(tensor) for tensor, i in zip(tensors, before, strict=True) if i < 0]))
        empty = [self._empty[i] if i >= 0 else next(blanks) for i in before]
        rows = zip(before, tensors, empty, strict=True)
        wide = [self._wide[i] if i >= 0 else _like(tensor, blank) for i, tensor, blank in rows]
        versions = versions_of(self._wide) if self._versions is None else self._versions
        for index in set(range(len(versions))).difference(before):
            reference, tensor = weakref.ref(self._wide[index]), self._tensors[index]
            if tensor.dtype is torch.float32 and tensor.shape == self._wide[index].shape:
                self._shared.append((reference, tensor))
            else:
                self._former.append((reference, tensor, versions[index]))
        self._versions = [versions[i] if i >= 0 else each._version for i, each in zip(before, wide, strict=True)]
        self._tensors, self._kinds, self._wide, self._empty = list(tensors), kinds, wide, empty
        self._are_sharded = any(map(is_sharded, tensors))
        self._parameters = [each for each in wide if isinstance(each, nn.Parameter)]
        for place, parameter in zip(before, wide, strict=True):
            if place < 0 and isinstance(parameter, nn.Parameter):
                record_data_use(parameter, self._use)
        self._tensor_of = dict(zip(map(id, wide), self._tensors, strict=True))
        return wide

    def adopt(self, master: Master) -> None:
        """Make the parameter that a weight had in earlier blocks its new full master's, because a user may keep it."""
        index = next((i for i, tensor in enumerate(self._tensors) if tensor is master.weight), None)
        if index is None or self._versions is None:
            return
        for each in (self._tensors, self._kinds, self._empty, self._versions):
            del each[index]
        wide = self._wide.pop(index)
        self._parameters = [each for each in self._parameters if each is not wide]
        self._tensor_of.pop(id(wide), None)
        stop_recording(wide)
        if isinstance(wide, nn.Parameter):
            set_data(wide, TENSOR_DATA.__get__(master.parameter))
            wide.requires_grad_(master.parameter.requires_grad)
            master.parameter = wide

    def fill(self, numbers: list[torch.Tensor]) -> None:
        """Set the memory of all float32 tensors at the beginning of a block."""
        self._versions = None
        if self._shared:
            self._shared = [each for each in self._shared if each[0]() is not None]
            for known, tensor in self._shared:
                set_data(known(), TENSOR_DATA.__get__(tensor))
        try:
            parts = [shard(each) for each in numbers] if self._are_sharded else numbers
            set_all_local_data(self._wide, parts, self._are_sharded)
        except BaseException:
            self.empty()
            raise

    def empty(self) -> None:
        """Empty all float32 tensors at the end of a block."""
        set_all_local_data(self._wide, self._empty, self._are_sharded)
        self._versions = versions_of(self._wide)
        # Tensors that `data` returned inside of the block have the memory of then.
        self._use.touched.clear()
        self._use.clear_replaced()
        if not all(wide.is_leaf for wide in self._wide if not isinstance(wide, nn.Parameter)):
            self._kinds = []  # a buffer that belongs to a graph now, so the next block needs another one

    def check_kept(self, names: Names) -> None:
        """Refuse writes to parameters that were kept from inside of a block that is over.

        Raises:
            RuntimeError: there was one, or a backward pass has computed a gradient of such a parameter.
        """
        nothing: list[torch.Tensor | None] = [None] * len(self._parameters)
        if self._versions is not None and (found := changed_grads(self._parameters, nothing)) is not None:
            set_grads(self._parameters, nothing)
            index = next(i for i, gradient in enumerate(found) if gradient is not None)
            raise RuntimeError(_GRADIENT_AFTER_BLOCK.format(names.of(self._tensor_of[id(self._parameters[index])])))
        if self._versions is not None and (now := changed_versions(self._wide, self._versions)) is not None:
            index = next(i for i, version in enumerate(self._versions) if version != now[i])
            self._empty_again()
            raise RuntimeError(_KEPT_FROM_BLOCK.format(names.of(self._tensors[index])))
        if self._versions is not None and self._use.touched:
            self._check_data(names)
        for place, (known, tensor, version) in enumerate(self._former):
            wide = known()
            if wide is not None and wide._version != version:
                self._former[place] = known, tensor, wide._version
                set_local_data(wide, *_emptied([shard(wide)]))
                raise RuntimeError(_KEPT_FROM_BLOCK.format(names.of(tensor)))
        if self._former:
            self._former = [each for each in self._former if each[0]() is not None]

    def _check_data(self, names: Names) -> None:
        """Refuse writes through ``data``, which torch does not count: other memory, or another number than nan."""
        used = self._use.touched
        rows = zip(self._tensors, self._wide, self._empty, strict=True)
        written = [
            tensor
            for tensor, wide, empty in rows
            if id(wide) in used
            and (shard(wide).data_ptr() != empty.data_ptr() or not bool(_first_of(empty).isnan().all()))
        ]
        if written:
            self._empty_again()
            raise RuntimeError(_KEPT_FROM_BLOCK.format(names.of(written[0])))

    def _empty_again(self) -> None:
        """Empty all float32 tensors after a write: some operations write to the one number of a tensor."""
        for empty in self._empty:
            _first_of(empty).fill_(torch.nan)
        self.empty()


def _first_of(empty: torch.Tensor) -> torch.Tensor:
    return empty.as_strided((min(1, empty.numel()),), (1,), empty.storage_offset())


def _like(tensor: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """Make an empty parameter, or another tensor if ``tensor`` is no parameter."""
    # With a version counter of its own: all of these numbers are views of one tensor.
    wide = sharded_as(TENSOR_DATA.__get__(empty), tensor)
    return nn.Parameter(wide, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wide


def _emptied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make float32 numbers of each tensor's shape that are all nan and cannot be written to."""
    devices = [tensor.device for tensor in tensors]
    nans = {
        device: iter(torch.full((count,), torch.nan, dtype=torch.float32, device=device).unbind())
        for device, count in Counter(devices).items()
    }
    return [next(nans[device]).expand(tensor.shape) for device, tensor in zip(devices, tensors, strict=True)]
