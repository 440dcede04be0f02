"""What is kept of the last overflow: which gradients were inf or nan, in the order of the backward pass."""

import math
from dataclasses import dataclass
from typing import final

import torch

from ..scaling.scaler import LossScaler
from ..torch_internals.operations import order_of_leaves
from .gradients import dense_view
from .members import Members


@dataclass(frozen=True)
class BadGradient:
    """A parameter whose gradient holds inf or nan.

    Attributes:
        name: its dotted name.
        elements, infs, nans: how many numbers there are, and of what kind.
        largest_finite: the largest magnitude among the others; 0.0 where there are none.
    """

    name: str
    elements: int
    infs: int
    nans: int
    largest_finite: float

    @property
    def share(self) -> float:
        """The share of its elements that are inf or nan."""
        return (self.infs + self.nans) / max(self.elements, 1)


@dataclass(frozen=True)
class OverflowRecord:
    """One overflow.

    Attributes:
        scaler: of the loss that overflowed; None where that is not known.
        scale: the scale it had; None likewise.
        loss: the loss, unscaled; None where reading it would have waited for the device.
        parameters: whose gradients are bad, those that the backward pass came to first in front.
    """

    scaler: LossScaler | None
    scale: float | None
    loss: float | None
    parameters: tuple[BadGradient, ...]

    def worst(self) -> tuple[BadGradient, ...]:
        """The parameters, the largest share of inf and nan first."""
        return tuple(sorted(self.parameters, key=lambda bad: -bad.share))

    @property
    def first_module(self) -> str | None:
        """The module of the first parameter; "" is the model itself."""
        return self.parameters[0].name.rpartition(".")[0] if self.parameters else None

    def advice(self) -> str:
        """Where it began, as far as gradients tell, and what to do, in two sentences."""
        if self.loss is not None and not math.isfinite(self.loss):
            return (
                f"The loss itself was {self.loss:g}, so it began in the forward pass, in the data or in the loss: "
                "`with mpinit.watch_overflow(model) as watch` around one batch names the module"
            )
        if not self.parameters:
            return "The gradients have been cleared since: look at mpinit.overflow_report(optimizer) before zero_grad()"
        module = self.first_module
        where = f"module {module!r}" if module else "the model's own parameters"
        entry = f"keep_fp32=[{module!r}]" if module else "keep_fp32"
        return (
            f"The backward pass met inf or nan in {where} first, so they were made there or in what its results go "
            "into: `with mpinit.watch_overflow(model) as watch` around one batch names the operation. Keep that in "
            f"float32 ({entry}), use bfloat16 (opt_level='O5'), or lower the learning rate; "
            "mpinit.suggest(model, optimizer, step) tries them out"
        )


@final
class OverflowLog:
    """The last overflow of one optimizer; written only where there is one."""

    def __init__(self, members: Members) -> None:
        self.last: OverflowRecord | None = None
        self._members = members

    def write(self, scaler: LossScaler | None, scale: float | None, loss: torch.Tensor | None) -> OverflowRecord:
        """Take down what the gradients are now; waits for their device."""
        self.last = self.read(scaler, scale, loss)
        return self.last

    @torch.no_grad()
    def read(self, scaler: LossScaler | None, scale: float | None, loss: torch.Tensor | None) -> OverflowRecord:
        """What :meth:`write` would record."""
        order = {} if loss is None else order_of_leaves(loss)
        found = []
        for index, weight in enumerate(self._members.weights):
            bad = None if weight.grad is None else _look(self._members.names.of(weight), weight.grad)
            if bad is not None:
                # Where the graph says nothing: a model's last parameters come first in its backward pass.
                found.append((order.get(weight, 0), -index, bad))
        found.sort(key=lambda row: row[:2])
        value = None if loss is None or loss.numel() != 1 else float(loss.detach())
        return OverflowRecord(scaler, scale, value, tuple(bad for *_, bad in found))


def _look(name: str, gradient: torch.Tensor) -> BadGradient | None:
    dense = dense_view(gradient.coalesce() if gradient.is_sparse else gradient)
    finite = torch.isfinite(dense)
    if bool(finite.all()):
        return None
    nans = int(dense.isnan().sum())
    infs = int((~finite).sum()) - nans
    largest = float(torch.where(finite, dense, 0).abs().max())
    return BadGradient(name, dense.numel(), infs, nans, largest)
