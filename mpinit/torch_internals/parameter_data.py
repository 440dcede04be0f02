"""A record of uses of ``parameter.data``, through which a parameter can be written without torch counting it.

torch counts in-place writes to a tensor in its version counter. The tensor that ``.data`` returns shares the memory but
has its own counter, so a write through it does not change the parameter's counter. Therefore
``torch.nn.Parameter.data`` is replaced by a property that records each read and write. It is installed while a weight
with a float32 master lives, and while a forward runs with casts in the places of its parameters
(``model/forward_weights.py``). It can be deleted when torch counts writes through ``.data``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from .running import reads_without_sync

TENSOR_DATA: Final[Any] = torch.Tensor.data
TENSOR_DETACH: Final[Any] = torch.Tensor.detach


@dataclass(eq=False, slots=True)
class DataUse:
    """The uses of ``data`` of some parameters, by the parameters' ids.

    Attributes:
        touched: parameters whose ``data`` was read or replaced. Their memory may be written at any time without a
            change of their version counter.
        replaced: parameters whose ``data`` was replaced since this set was last cleared. Their memory may have another
            dtype, shape or layout.
        former: parameters whose ``data`` was replaced by a tensor of another dtype since then -> the data before.
        kept: parameters that :meth:`keep` was called with -> a copy of their numbers, made when ``data`` was first
            touched; None before.
        changes: parameters -> how often :meth:`keep` found numbers that differ from the copy. Only on devices that are
            read without a device sync.
        views: the tensors that reads of ``data`` returned, with the id of their parameter; None where not recorded.
    """

    touched: set[int] = field(default_factory=set)
    replaced: set[int] = field(default_factory=set)
    former: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[int, torch.Tensor | None] = field(default_factory=dict)
    changes: dict[int, int] = field(default_factory=dict)
    views: list[tuple[int, torch.Tensor]] | None = None

    def written(self) -> set[int]:
        """Return the parameters that were written through their ``data``, where ``views`` are recorded."""
        return self.replaced | {key for key, view in self.views or () if view._version > 0}

    def discard(self, parameter: torch.Tensor) -> None:
        """Drop the records of a parameter."""
        self.touched.discard(id(parameter))
        self.replaced.discard(id(parameter))
        self.former.pop(id(parameter), None)
        self.kept.pop(id(parameter), None)

    def clear_replaced(self) -> None:
        """Forget which parameters' data was replaced: all of their new memory has been adopted."""
        self.replaced.clear()
        self.former.clear()

    def keep(self, parameter: torch.Tensor) -> None:
        """Copy a parameter's present numbers: now if its ``data`` was touched, or else when it is touched."""
        key, before = id(parameter), self.kept.get(id(parameter))
        self.kept[key] = now = _copy_of(parameter) if key in self.touched else None
        if now is None or before is None:
            return
        if reads_without_sync(now.device) and not have_same_bits(now, before):
            self.changes[key] = self.changes.get(key, 0) + 1

    def drop_copies(self) -> None:
        """Free the copies of numbers: the session that compares with them was freed."""
        self.kept = {}
        self.former.clear()

    def watch(self, tensor: torch.Tensor, is_recorded: bool) -> None:
        """Let a tensor's :meth:`clock` count writes through its ``data``, too, from now on.

        Args:
            tensor: a parameter or buffer.
            is_recorded: whether :func:`record_data_use` was called for it.
        """
        key = id(tensor)
        if tensor.is_inference():
            return
        if key in self.touched:
            self.keep(tensor)
        elif key not in self.kept and isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            self.kept[key] = None
            if not is_recorded:
                record_data_use(tensor, self)

    def watch_all(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch many parameters for which :func:`record_data_use` was called."""
        for parameter in parameters:
            if id(parameter) in self.touched:
                self.keep(parameter)
            elif not parameter.is_meta:
                self.kept.setdefault(id(parameter))

    def clock(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return numbers that have changed if the tensor was written to since the last call; this changes nothing.

        They are its version counter, that of its local shard, and how often its copy differed. The tuple is empty for
        an inference tensor, which has no version counter.
        """
        if tensor.is_inference():
            return ()
        part = getattr(tensor, "_local_tensor", tensor)
        before, changes = self.kept.get(id(tensor)), self.changes.get(id(tensor), 0)
        if before is not None and reads_without_sync(before.device):
            now = getattr(TENSOR_DETACH(tensor), "_local_tensor", TENSOR_DETACH(tensor))
            changes += not have_same_bits(now, before)
        return tensor._version, part._version, changes

    def touch(self, parameter: torch.Tensor) -> None:
        """Record that a parameter's ``data`` is about to be read or replaced."""
        key = id(parameter)
        kept = self.kept
        if key in kept and kept[key] is None:
            kept[key] = _copy_of(parameter)
        self.touched.add(key)


def have_same_bits(these: torch.Tensor, those: torch.Tensor) -> bool:
    """Compare two tensors bit by bit; this needs a device sync."""
    bits = torch.int16 if these.element_size() == 2 else torch.int32
    is_alike = these.shape == those.shape and these.dtype == those.dtype
    return is_alike and torch.equal(these.contiguous().view(bits), those.contiguous().view(bits))


def _copy_of(parameter: torch.Tensor) -> torch.Tensor:
    copied: torch.Tensor = getattr(TENSOR_DETACH(parameter), "_local_tensor", TENSOR_DETACH(parameter)).clone()
    return copied


_recorded_in: Final[dict[int, DataUse]] = {}
# The id of a record -> the parameters of record_batch and the record.
_batches: Final[dict[int, tuple[Sequence[torch.Tensor], DataUse]]] = {}


def record_data_use(parameter: torch.Tensor, use: DataUse) -> None:
    """Record in ``use``, from now on, when ``parameter.data`` is read or replaced."""
    if not _recorded_in:
        _patch()
    _recorded_in[id(parameter)] = use


def stop_recording(parameter: torch.Tensor) -> None:
    """Reverse :func:`record_data_use`; for the last parameter, remove the property from the class."""
    _recorded_in.pop(id(parameter), None)
    _unpatch()


def stop_recording_all(use: DataUse) -> None:
    """Reverse :func:`record_data_use` for every parameter that is recorded in ``use``."""
    for key in [key for key, recorded_in in list(_recorded_in.items()) if recorded_in is use]:
        _recorded_in.pop(key, None)
    _unpatch()


def record_batch(parameters: Sequence[torch.Tensor], keeps_views: bool = False) -> DataUse:
    """Record the use of several parameters' ``data`` until :func:`stop_batch`.

    Args:
        parameters: the parameters.
        keeps_views: whether :meth:`DataUse.written` is going to be called. Default False.
    """
    use = DataUse(views=[] if keeps_views else None)
    if parameters:
        _patch()
        _batches[id(use)] = parameters, use
    return use


def stop_batch(use: DataUse) -> None:
    """Reverse :func:`record_batch`."""
    if _batches.pop(id(use), None) is not None:
        _unpatch()


def _patch() -> None:
    if nn.Parameter.data is TENSOR_DATA:
        nn.Parameter.data = property(_get, _set)  # type: ignore[assignment]


def _unpatch() -> None:
    if not (_recorded_in or _batches) and nn.Parameter.data is not TENSOR_DATA:
        del nn.Parameter.data


def _record(parameter: torch.Tensor) -> list[DataUse]:
    """Record that a parameter's ``data`` is used; return the records that it is in."""
    uses = [use for parameters, use in list(_batches.values()) if any(each is parameter for each in parameters)]
    if id(parameter) in _recorded_in:
        uses.append(_recorded_in[id(parameter)])
    for use in uses:
        use.touch(parameter)
    return uses


def _get(parameter: torch.Tensor) -> torch.Tensor:
    uses = _record(parameter)
    values: torch.Tensor = TENSOR_DATA.__get__(parameter)
    for use in uses:
        if use.views is not None:
            use.views.append((id(parameter), values))
    return values


def _set(parameter: torch.Tensor, values: torch.Tensor) -> None:
    uses = _record(parameter)
    former = TENSOR_DETACH(parameter) if uses and values.dtype is not parameter.dtype else None
    TENSOR_DATA.__set__(parameter, values)
    for use in uses:
        if former is not None and id(parameter) not in use.replaced:
            use.former[id(parameter)] = former
        use.replaced.add(id(parameter))
