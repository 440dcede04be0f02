"""Base of a session's masters: the float32 meaning of every 16-bit weight that is trained."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import ClassVar, Final

import torch
from torch import nn

from ..basics.dtypes import LOWER_PRECISION
from ..basics.modules import Names
from ..basics.patching import undo_when_dropped
from ..distributed.sharding import is_distributed, is_sharded, set_data, shard
from ..torch_internals.parameter_data import DataUse, record_data_use, stop_recording, stop_recording_all

Gradients = Sequence[torch.Tensor | None]
# The address of a weight's numbers, their strides, shape, dtype and device.
Layout = tuple[int, tuple[int, ...], torch.Size, torch.dtype, torch.device]

IN_FLOAT32: Final = (
    "{} was called inside `with mpinit.float32_weights(...)`, where the weights that optimizers know are not up to "
    "date: move it before or after the with-block"
)
_SHARED: Final = (
    "the weights {!r} and {!r} share memory since mpinit.initialize, and have a float32 master each: a step would "
    "round both into it, and lose one of the two updates. Tie weights before mpinit.initialize, as one parameter "
    "(b.weight = a.weight); to copy numbers call b.weight.copy_(a.weight) under torch.no_grad()"
)
CONVERTED: Final = (
    "the data of {!r} was replaced by a tensor of {} in a process group, where DistributedDataParallel records the "
    "dtype of its parameters: copy the numbers instead, inside `with mpinit.float32_weights(model)`, or load them by "
    "model.load_state_dict()"
)


class Master:
    """One weight, and the float32 parameter that an optimizer finds in its place while its own code runs.

    Attributes:
        original_dtype: the weight's dtype before it was cast.
        dtype: the 16-bit dtype that the weight was cast to.
        layout: where the weight's memory was when it was last read.
        clamps: whether a number of the master is known to be beyond the largest of the weight's dtype, so that rounding
            clamps.
        gradient: the weight's gradient while the weight gets another dtype, so that an interrupted change can be
            repeated.
        optimizers: how many optimizers have the weight in their groups.
        last_seen: of a full master: the weight's fingerprint after the last rounding, to detect writes to the weight.
            None: the weight may have been written to.
    """

    __slots__ = (
        "clamps",
        "dtype",
        "gradient",
        "is_sharded",
        "last_seen",
        "layout",
        "optimizers",
        "original_dtype",
        "parameter",
        "weight",
    )

    def __init__(self, weight: nn.Parameter, parameter: nn.Parameter) -> None:
        self.weight = weight
        self.parameter = parameter
        self.original_dtype = weight.dtype
        self.dtype = weight.dtype
        self.layout: Layout | None = None
        self.optimizers = 0
        self.is_sharded = is_sharded(weight)
        self.clamps = False
        self.gradient: torch.Tensor | None = None
        self.last_seen: tuple[object, torch.Tensor | None] | None = None


def layout_of(weight: torch.Tensor) -> Layout:
    """Return the layout of a weight; of a sharded one that of its local part."""
    here = getattr(weight, "_local_tensor", weight)
    address = 0 if here.is_meta or here.layout is not torch.strided else here.data_ptr()
    return address, here.stride(), here.shape, here.dtype, here.device


def _detach_gradient(master: Master) -> None:
    """Let the weight accept gradients of any dtype: torch cannot reset ``grad_dtype`` to "the tensor's own dtype"."""
    if master.weight.grad is not None:
        master.gradient = master.weight.grad
    master.weight.grad = None
    master.weight.grad_dtype = None


def _attach_gradient(master: Master) -> None:
    if master.gradient is not None:
        master.weight.grad = master.gradient.to(master.weight.dtype)
        master.gradient = None


class MasterBatch(ABC):
    """Masters that are read and rounded together, in bulk."""

    @abstractmethod
    def stepped(self) -> None:
        """Record that native code has stepped the masters and rounded them into their weights."""

    @abstractmethod
    def follow_writes(self) -> None:
        """Apply writes to weights since the last rounding to their masters."""

    @abstractmethod
    def read(self) -> None:
        """Set every master to the float32 values that its weight means."""

    @abstractmethod
    def widened(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Return the weights' gradients in float32, for the masters; between :meth:`read` and :meth:`write`."""

    @abstractmethod
    def write(self) -> None:
        """Round every master into its weight."""


class Masters(ABC):
    """The masters of a session, one for each weight however many optimizers step it.

    Attributes:
        names: the names of the models' parameters, for messages.
        are_in_model: whether the masters are in the models' modules at the moment, inside a ``float32_weights`` block.
            Then the masters have the present values, and the weights are out of date.
        keeps_bits: whether the code that uses the masters now changes no weight, as ``load_state_dict`` of an
            optimizer. Then the masters' lower bits are kept, also of weights that were written to and may be restored.
        data_use: the uses of ``data`` of the weights, and of masters that users have.
        stop_recording: a function that ends the record of these uses.
        steps_in_parts: whether a step makes float32 masters of a bucket of weights at a time.
    """

    steps_in_parts: ClassVar[bool]

    def __init__(self, names: Names | None = None) -> None:
        self.names = names or Names([])
        self._of: dict[int, Master] = {}
        self.are_in_model = self.keeps_bits = False
        self.data_use = DataUse()
        self.stop_recording = undo_when_dropped(
            self, functools.partial(stop_recording_all, self.data_use), at_once=self.data_use.drop_copies
        )

    def __iter__(self) -> Iterator[Master]:
        return iter(list(self._of.values()))

    def __len__(self) -> int:
        return len(self._of)

    def of(self, weight: torch.Tensor) -> Master | None:
        """Return the master of a weight; None where it has none."""
        return self._of.get(id(weight))

    def add(self, weight: nn.Parameter, dtype: torch.dtype) -> Master | None:
        """Make the master of a weight that is, or is about to be cast to, ``dtype``; None where it needs none."""
        if dtype not in LOWER_PRECISION:
            return None
        master = self._of[id(weight)] = self._make(weight)
        return master

    def discard(self, master: Master) -> None:
        """Drop a master; its weight is a plain 16-bit parameter from now on. May be called again."""
        if id(master.weight) in self._of:
            _detach_gradient(master)
            _attach_gradient(master)
            stop_recording(master.weight)
            stop_recording(master.parameter)
            self.data_use.discard(master.weight)
            self.data_use.discard(master.parameter)
            self._discard(master)
            del self._of[id(master.weight)]

    def restore(self, master: Master, dtype: torch.dtype) -> None:
        """Set a weight to its master's values in ``dtype``, and its gradient too. May be called again."""
        weight = master.weight
        if weight.shape != master.parameter.shape:
            return  # FSDP1 has replaced its memory, and was refused
        if weight.dtype != dtype and self.is_cast(master):
            values = self.values(master).to(dtype)
            _detach_gradient(master)
            set_data(weight, values)
        _attach_gradient(master)

    def cast(self, master: Master, dtype: torch.dtype, clamps: bool) -> None:
        """Cast a weight whose master was just added, and its gradient. The master keeps every bit of the weight.

        Args:
            master: the master of the weight.
            dtype: the 16-bit dtype.
            clamps: whether finite numbers of the weight are beyond the largest of ``dtype``; they become that largest.
        """
        weight, gradient = master.weight, master.weight.grad
        master.clamps = clamps
        try:
            weight.grad = None
            record_data_use(weight, self.data_use)
            self._cast(master, dtype)
            master.dtype, master.layout = dtype, layout_of(weight)
            self.set_gradient_dtype(master)
            if gradient is not None:
                weight.grad = self.in_kept_dtype([gradient])[0]
        except BaseException:
            weight.grad_dtype = None
            weight.grad = gradient
            raise

    def follow_replaced_memory(self, masters: Iterable[Master] | None = None) -> None:
        """Adopt new memory of weights, which an assignment to ``data`` may have set to another dtype, shape or device.

        Numbers of another dtype count exactly, and the weight gets its 16-bit dtype back. After a change of shape,
        elements that are in both shapes keep their lower bits.

        Args:
            masters: the masters to examine. Default: those whose weights' ``data`` was replaced since the last call.

        Raises:
            RuntimeError: two weights with masters share memory, or a dtype was changed in a process group. Nothing was
                changed.
        """
        if masters is None:
            replaced = self.data_use.replaced
            masters = [self._of[key] for key in replaced if key in self._of]
        moved = [master for master in masters if layout_of(master.weight) != master.layout]
        if moved:
            self._check_unshared()
            for master in moved:
                if master.weight.dtype is not master.dtype and is_distributed():
                    name = self.names.of(master.weight)
                    raise RuntimeError(CONVERTED.format(name, master.weight.dtype))
            for master in moved:
                self._follow_memory(master)
                master.layout = layout_of(master.weight)
        self.data_use.clear_replaced()

    def _check_unshared(self) -> None:
        shards = [(shard(master.weight), master.weight) for master in self._of.values()]
        found = [
            (here.data_ptr(), here.data_ptr() + here.numel() * here.element_size(), weight)
            for here, weight in shards
            if here.numel() and not here.is_meta and here.layout is torch.strided
        ]
        found.sort(key=lambda entry: entry[:2])
        for (_, end, one), (begin, _, other) in pairwise(found):
            if begin < end:
                raise RuntimeError(_SHARED.format(self.names.of(one), self.names.of(other)))

    @abstractmethod
    def _make(self, weight: nn.Parameter) -> Master:
        """Make a master. A float32 weight's master gets its memory, because the cast allocates new memory."""

    @abstractmethod
    def _discard(self, master: Master) -> None:
        """Drop the records of a master."""

    @abstractmethod
    def _cast(self, master: Master, dtype: torch.dtype) -> None:
        """Replace the weight's memory by new memory in ``dtype``."""

    @abstractmethod
    def _follow_memory(self, master: Master) -> None:
        """Adopt a weight's new memory."""

    @abstractmethod
    def is_cast(self, master: Master) -> bool:
        """Return whether the weight has been cast, so that its numbers are its master's rounded."""

    @abstractmethod
    def set_gradient_dtype(self, master: Master) -> None:
        """Set the ``grad_dtype`` of the weight, in which autograd accumulates its gradient."""

    @abstractmethod
    def values(self, master: Master) -> torch.Tensor:
        """Return the float32 values of a weight; the tensor must not be written to. Changes nothing."""

    @abstractmethod
    def load(self, master: Master, values: torch.Tensor) -> None:
        """Set a weight and its master from float32 numbers of its shape."""

    @abstractmethod
    def in_kept_dtype(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Cast gradients to the dtype in which weights keep them between a backward pass and a step."""

    @abstractmethod
    def batch(self, masters: Sequence[Master], device: torch.device) -> MasterBatch:
        """Make a batch of masters on one device, for a step or a part of one."""
