"""A session's masters: the float32 meaning of every 16-bit weight that is trained."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import nn

from ..basics.dtypes import is_lower_precision
from ..distributed.sharding import is_sharded, set_data

Gradients = Sequence[torch.Tensor | None]

IN_FLOAT32: Final = (
    "{} was called inside `with mpinit.float32_weights(...)`, where the weights that optimizers know are not up to "
    "date: move it before or after the with-block"
)


class Master:
    """One weight, and the float32 parameter that an optimizer finds in its place while its own code runs.

    Attributes:
        came_in: the weight's dtype before it was cast.
        clamps: whether finite numbers beyond the weight's largest are known to be there; they become that largest.
        gradient: the weight's, while it gets another type; what is interrupted there may be done again.
        noted: by what full masters notice writes to the weight: what it was when this was rounded into it; None: it
            may have been written to.
    """

    __slots__ = ("came_in", "clamps", "gradient", "is_sharded", "noted", "parameter", "weight")

    def __init__(self, weight: nn.Parameter, parameter: nn.Parameter) -> None:
        self.weight = weight
        self.parameter = parameter
        self.came_in = weight.dtype
        self.is_sharded = is_sharded(weight)
        self.clamps = False
        self.gradient: torch.Tensor | None = None
        self.noted: torch.Tensor | int | None = None


def _take_gradient(master: Master) -> None:
    """Let the weight take gradients of any type: torch has no way back to "the tensor's own dtype"."""
    if master.weight.grad is not None:
        master.gradient = master.weight.grad
    master.weight.grad = None
    master.weight.grad_dtype = None


def _give_gradient(master: Master) -> None:
    if master.gradient is not None:
        master.weight.grad = master.gradient.to(master.weight.dtype)
        master.gradient = None


class OpenMasters(ABC):
    """Masters that are put together and rounded together, in columns."""

    @abstractmethod
    def stepped(self) -> None:
        """Other code has made masters follow their weights, stepped them and rounded them."""

    @abstractmethod
    def read(self) -> None:
        """Let every parameter hold the meaning of its weight, in float32."""

    @abstractmethod
    def widened(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """The weights' gradients in float32, for the parameters; between :meth:`read` and :meth:`write`."""

    @abstractmethod
    def write(self) -> None:
        """Round every parameter into its weight."""


class Masters(ABC):
    """The masters of a session, one for each weight however many optimizers step it.

    Attributes:
        are_in_model: whether they stand in the models' modules at the moment: what they hold is true, and not the
            weights.
        exposed: what has given masters out to users since the last step; each has a ``settle()``.
        steps_in_parts: whether a step is to hold as few float32 masters at a time as possible.
    """

    steps_in_parts: ClassVar[bool]

    def __init__(self) -> None:
        self._of: dict[int, Master] = {}
        self.are_in_model = False
        self.exposed: set[Any] = set()

    def __iter__(self) -> Iterator[Master]:
        return iter(list(self._of.values()))

    def __len__(self) -> int:
        return len(self._of)

    def of(self, weight: torch.Tensor) -> Master | None:
        return self._of.get(id(weight))

    def add(self, weight: nn.Parameter, dtype: torch.dtype) -> Master | None:
        """Make the master of a weight that is, or is about to be cast to, ``dtype``; None where it needs none."""
        if not is_lower_precision(dtype):
            return None
        master = self._of[id(weight)] = self._make(weight)
        return master

    def discard(self, master: Master) -> None:
        """Forget a master; its weight is a plain 16-bit parameter from here on. Harmless where it is forgotten."""
        if id(master.weight) in self._of:
            _take_gradient(master)
            _give_gradient(master)
            self._forget(master)
            del self._of[id(master.weight)]

    def restore(self, master: Master, dtype: torch.dtype) -> None:
        """Give a weight its master's numbers in ``dtype``, and its gradient; harmless where it has them already."""
        weight = master.weight
        if weight.shape != master.parameter.shape:
            return  # FSDP1 has taken its memory, and was refused
        if weight.dtype != dtype and self.is_cast(master):
            values = self.values(master).to(dtype)
            _take_gradient(master)
            set_data(weight, values)
        _give_gradient(master)

    def cast(self, master: Master, dtype: torch.dtype, clamps: bool) -> None:
        """Cast a weight that was just added; no bit of it is lost to its master. Its gradient goes along.

        ``clamps``: it holds finite numbers beyond the largest of ``dtype``, which become that largest.
        """
        weight, gradient = master.weight, master.weight.grad
        master.clamps = clamps
        try:
            weight.grad = None
            self._cast(master, dtype)
            self.set_gradient_dtype(master)
            weight.grad = self.held([gradient])[0]
        except BaseException:
            weight.grad_dtype = None
            weight.grad = gradient
            raise

    @abstractmethod
    def _make(self, weight: nn.Parameter) -> Master:
        """A float32 weight hands its memory over without a copy: it is about to be cast, and gets new memory then."""

    @abstractmethod
    def _forget(self, master: Master) -> None:
        """Nothing of a master is needed any more."""

    @abstractmethod
    def _cast(self, master: Master, dtype: torch.dtype) -> None:
        """Give the weight new memory in ``dtype``."""

    @abstractmethod
    def is_cast(self, master: Master) -> bool:
        """Whether the weight's own numbers are its master's roundings by now."""

    @abstractmethod
    def set_gradient_dtype(self, master: Master) -> None:
        """Let autograd accumulate gradients on the weight in the type in which they are kept."""

    @abstractmethod
    def values(self, master: Master) -> torch.Tensor:
        """What a weight means, float32; not to be written to."""

    @abstractmethod
    def load(self, master: Master, values: torch.Tensor) -> None:
        """Set a weight and its master from float32 numbers of its shape."""

    @abstractmethod
    def held(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Gradients in the type in which weights keep them between a backward pass and a step."""

    @abstractmethod
    def opened(self, masters: Sequence[Master], device: torch.device) -> OpenMasters:
        """Columns of masters on one device, for a step or a part of one."""
