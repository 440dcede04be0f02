"""Which parameter, module and operation an overflow came from: after it, from gradients, or while it happens."""

from dataclasses import dataclass
from typing import final

from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..basics.tables import counted
from ..checks import ends_at_the_caller
from ..optimizer.overflow_log import BadGradient
from .faults import OverflowWatch


@final
@dataclass(frozen=True)
class OverflowReport:
    """What :func:`overflow_report` found.

    Attributes:
        loss_id: of the loss that overflowed; None where that is not known.
        scale: the loss scale its backward pass had; None likewise.
        loss: the loss, unscaled; None where reading it would have waited for the device.
        gradients: the parameters whose gradients hold inf or nan, with their numbers, the largest share of them first.
        first_module: the dotted name of the module that the backward pass came to first of those; None where it is no
            module's.
        advice: what to do next, in words.
    """

    loss_id: int | None
    scale: float | None
    loss: float | None
    gradients: tuple[BadGradient, ...]
    first_module: str | None
    advice: str

    @property
    def parameters(self) -> tuple[str, ...]:
        """Dotted names of the parameters of ``gradients``."""
        return tuple(bad.name for bad in self.gradients)

    def __str__(self) -> str:
        if self.loss_id is None and not self.parameters:
            return self.advice
        scale = "unknown" if self.scale is None else f"{self.scale:g}"
        loss = "" if self.loss is None else f", loss {self.loss:g}"
        lines = [
            f"overflow of loss {self.loss_id} at scale {scale}{loss}: {counted(len(self.parameters), 'parameter')}"
        ]
        for bad in self.gradients[:20]:
            lines.append(
                f"  {bad.name}: {bad.infs} inf, {bad.nans} nan of {bad.elements}, largest finite "
                f"{bad.largest_finite:.4g}"
            )
        if len(self.gradients) > 20:
            lines.append(f"  and {len(self.gradients) - 20} more")
        return "\n".join([*lines, self.advice])


@ends_at_the_caller
def overflow_report(optimizer: Optimizer) -> OverflowReport:
    """Why the last step of an optimizer was skipped. Good steps pay nothing for it.

    Which gradients hold inf or nan is recorded when an overflow is found, with the order in which the backward pass
    came to them, so the report can be had after ``zero_grad()`` too. Gradients do not tell which *operation* began it:
    for that run the batch again in :func:`watch_overflow`.

    Args:
        optimizer: an initialised optimizer.

    Returns:
        The report; printed, it is a few lines of text. Where no step has overflowed, one without parameters.

    Raises:
        RuntimeError: the optimizer is not initialised.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> with mpinit.scale_loss(model(torch.ones(1, 4)).sum() * 1e6, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> report = mpinit.overflow_report(optimizer)
        >>> report.first_module, report.scale
        ('1', 65536.0)
        >>> mpinit.undo(model)
    """
    session = registry.session_of(optimizer)
    log = session.overflow_log(optimizer)
    record = log.read(None, None, None)
    last, now = ({bad.name for bad in each.parameters} for each in (log.last or record, record))
    if log.last is not None and (not now or last == now):
        record = log.last
    worst = record.worst()
    has_overflowed = log.last is not None or bool(worst)
    known = [index for index, scaler in enumerate(session.scalers) if scaler is record.scaler]
    return OverflowReport(
        loss_id=known[0] if known else (0 if has_overflowed and len(session.scalers) == 1 else None),
        scale=record.scale,
        loss=record.loss,
        gradients=worst,
        first_module=record.first_module,
        advice=record.advice() if has_overflowed else "no step of this optimizer has overflowed",
    )


@ends_at_the_caller
def watch_overflow(model: nn.Module) -> OverflowWatch:
    """Context manager that looks at every operation for the first that makes inf or nan out of finite numbers.

    In the forward pass, in the backward pass, and in the loss. It works on any model, initialised or not, and changes
    no number; runs inside are several times slower. Its hooks are removed at the end, also after an exception. What a
    program writes out as infinite (a mask of -inf) is no fault, and neither is what does no harm: where results and
    gradients are finite, nothing is found.

    Args:
        model: whose modules are named.

    Yields:
        The watch, with ``first_module``, ``kind``, and all of it, inputs too, as a :class:`Fault` in ``first``.

    Example:
        >>> import torch, mpinit
        >>> model = mpinit.initialize(torch.nn.Linear(4, 4), opt_level="O3", verbosity=0)
        >>> with mpinit.watch_overflow(model) as watch:
        ...     _ = model(torch.full((1, 4), 6e4) * torch.tensor([1.0, -1.0, 2.0, 1.0]))
        >>> watch.kind, watch.first.operation
        ('cast', 'aten._to_copy.default')
        >>> mpinit.undo(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch_overflow takes a module, not {type(model).__name__}")
    return OverflowWatch(model)
