"""Base of a session's masters: the float32 numbers of every 16-bit weight that is trained."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import nn

from ..basics.dtypes import LOWER_PRECISION, as_float32
from ..basics.modules import Names, share_attributes
from ..distributed.sharding import is_sharded, set_data
from ..torch_internals.parameter_data import Watched, has_other_data

_IN_BLOCK: Final = (
    "{} was called inside `with mpinit.float32_weights(...)`, where the weights that optimizers know are not up to "
    "date: move it before or after the with-block"
)
_OTHER_DATA: Final = (
    "the data of {!r} was replaced by a tensor of {} and shape {}, and mpinit.initialize has made a float32 master for "
    "its {} numbers of shape {}: write the numbers with copy_() under torch.no_grad(), load them by "
    "model.load_state_dict(), or write them inside `with mpinit.float32_weights(model)`"
)


class Master:
    """One weight, and the float32 parameter that an optimizer finds in its place while its own code runs.

    Attributes:
        original_dtype: the weight's dtype before it was cast.
        dtype: the 16-bit dtype that the weight is cast to.
        gradient: the weight's gradient while the weight gets another dtype, so that an interrupted change can be
            repeated.
    """

    __slots__ = (
        "dtype",
        "gradient",
        "is_sharded",
        "original_dtype",
        "parameter",
        "weight",
    )

    def __init__(self, weight: nn.Parameter, parameter: nn.Parameter) -> None:
        self.weight = weight
        self.parameter = parameter
        self.original_dtype = weight.dtype
        self.dtype = weight.dtype
        self.is_sharded = is_sharded(weight)
        self.gradient: torch.Tensor | None = None
        share_attributes(weight, parameter)  # an optimizer may read them


class MasterBatch(ABC):
    """Masters that are read and rounded together, in bulk."""

    @abstractmethod
    def read(self) -> None:
        """Set every master to the float32 values that its weight means, by the law."""

    @abstractmethod
    def widened(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the weights' gradients in float32, for the masters; between :meth:`read` and :meth:`write`."""

    @abstractmethod
    def write(self) -> None:
        """Round every master into its weight."""


class Masters(ABC):
    """The masters of a session, one for each weight however many optimizers step it.

    Attributes:
        names: the names of the models' parameters, for messages.
        grad_dtype: the dtype in which autograd accumulates gradients of weights: float32 if the user asked for it. None
            lets a gradient be 16-bit or float32.
        are_in_model: whether the model has float32 parameters at the moment, inside a ``float32_weights`` block.
        steps_in_parts: whether a step makes float32 masters of a bucket of weights at a time.
        kept_slots: what ``float32_weights`` keeps from block to block; None after a weight got or lost its master.
        watched: the parameters whose ``data`` is watched for writes.
        users: the parameters of each optimizer, with the list of their ``masters``; freed with the optimizer.
    """

    steps_in_parts: ClassVar[bool]

    def __init__(self, names: Names | None = None, grad_dtype: torch.dtype | None = None) -> None:
        self.names = names or Names([])
        self.grad_dtype = grad_dtype
        self.are_in_model = False
        self.kept_slots: Any = None
        self.watched = Watched()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._of: dict[int, Master] = {}

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
        master.dtype = dtype
        self.kept_slots = None
        return master

    def cast(self, masters: Sequence[Master]) -> None:
        """Cast weights whose masters were just added, and their gradients. The masters keep every bit of them."""
        gradients = [(master.weight, master.weight.grad) for master in masters]
        present = [(weight, gradient) for weight, gradient in gradients if gradient is not None]
        try:
            for weight, _ in present:
                weight.grad = None
            self.watched.add(weight for weight, _ in gradients)
            self._cast(masters)
            for weight, _ in gradients:
                weight.grad_dtype = self.grad_dtype
            for weight, gradient in present:
                weight.grad = gradient if self.grad_dtype is None else as_float32(gradient)
        except BaseException:
            for weight, gradient in present:
                weight.grad_dtype = None
                weight.grad = gradient
            raise

    def discard(self, master: Master, dtype: torch.dtype | None = None) -> None:
        """Drop a master; its weight is a plain parameter from now on. May be called again.

        Args:
            master: the master.
            dtype: the dtype in which the weight gets its master's values, and its gradient; None: it stays as it is.
        """
        weight = master.weight
        if id(weight) not in self._of:
            return
        has_own_memory = weight.shape == master.parameter.shape  # FSDP1 has replaced it, and was refused
        if dtype is not None and has_own_memory and weight.dtype not in (dtype, torch.float32):
            values = self.values(master).to(dtype)
            _detach_gradient(master)
            set_data(weight, values)
        else:
            _detach_gradient(master)
        if master.gradient is not None:
            weight.grad = master.gradient.to(weight.dtype)
            master.gradient = None
        self.watched.discard([weight, master.parameter])
        self.kept_slots = None
        del self._of[id(weight)]

    def refuse_inside_block(self, what: str) -> None:
        """Refuse to do ``what`` inside of a ``float32_weights`` block."""
        if self.are_in_model:
            raise RuntimeError(_IN_BLOCK.format(what))

    def check_data(self, masters: Iterable[Master]) -> None:
        """Refuse weights whose ``data`` was replaced by a tensor of another dtype or shape.

        Raises:
            RuntimeError: there is one.
        """
        changed = has_other_data()
        for master in masters if changed else ():
            weight, shape = master.weight, master.parameter.shape
            if id(weight) in changed and (weight.dtype, weight.shape) != (master.dtype, shape):
                given = self.names.of(weight), weight.dtype, tuple(weight.shape)
                raise RuntimeError(_OTHER_DATA.format(*given, master.dtype, tuple(shape)))

    def follow_writes(self) -> None:
        """Round masters that users have written to into their weights; at a forward, a step, and before a read.

        Inside of a ``float32_weights`` block there are no weights to round into.

        Raises:
            RuntimeError: the data of a weight has another dtype or shape, or a weight and its master were both written
                to, differently.
        """
        if not self.are_in_model:
            self._follow_writes()

    @abstractmethod
    def _follow_writes(self) -> None:
        """Do the same outside of these blocks."""

    @abstractmethod
    def hand_out(self, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """List the masters of weights as users have them; for a weight without one that lasts, the weight."""

    @abstractmethod
    def _make(self, weight: nn.Parameter) -> Master:
        """Make a master. A float32 weight's master gets its memory, because the cast allocates new memory."""

    @abstractmethod
    def _cast(self, masters: Sequence[Master]) -> None:
        """Replace the memory of weights by new memory in the dtypes of their masters."""

    @abstractmethod
    def values(self, master: Master) -> torch.Tensor:
        """Return the float32 values of a weight; the tensor must not be written to. Changes nothing."""

    @abstractmethod
    def load(self, master: Master, values: torch.Tensor) -> None:
        """Set a weight and its master from float32 numbers of its shape."""

    @abstractmethod
    def batch(self, masters: Sequence[Master], device: torch.device) -> MasterBatch:
        """Make a batch of masters on one device, for a step or a part of one."""


def _detach_gradient(master: Master) -> None:
    """Let the weight accept gradients of any dtype: torch cannot reset ``grad_dtype`` to "the tensor's own dtype"."""
    if master.weight.grad is not None:
        master.gradient = master.weight.grad
    master.weight.grad = None
    master.weight.grad_dtype = None
