"""Which parameter, module and operation an overflow came from: after it, from gradients, or while it happens."""

from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..checks import ends_at_the_caller
from ..optimizer.overflow_log import OverflowReport
from .faults import OverflowWatch


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
    now = log.read(None, None, None)
    if log.last is None and not now.gradients:
        return replace(now, advice="no step of this optimizer has overflowed")
    before = now if log.last is None else log.last
    report = before if not now.gradients or set(before.parameters) == set(now.parameters) else now
    is_known = report.loss_id is not None or len(session.scalers) > 1
    return report if is_known else replace(report, loss_id=0)


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
