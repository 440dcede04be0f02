"""What a training loop asks of its session as it runs: the scale, which steps were done, and all of it in words."""

from typing import Any

from torch.optim import Optimizer

from . import registry
from .basics.tables import counted
from .checks import ends_at_the_caller
from .optimizer.managed import ManagedOptimizer
from .session import Session


@ends_at_the_caller
def loss_scale(optimizer: Optimizer, loss_id: int = 0) -> float:
    """The number that :func:`scale_loss` multiplies this optimizer's loss by. A dynamic one is read off the device.

    Args:
        optimizer: an initialised optimizer.
        loss_id: which of the session's ``num_losses`` scalers is meant. Default 0.

    Returns:
        The scale; 1.0 where nothing is scaled or mpinit is disabled.

    Raises:
        RuntimeError: the optimizer is not initialised.
        ValueError: no such ``loss_id``.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> mpinit.loss_scale(optimizer)
        65536.0
        >>> mpinit.undo(model)
    """
    session = registry.session_meant(optimizer)
    return 1.0 if session is None else session.scaler(loss_id).loss_scale()


@ends_at_the_caller
def step_was_skipped(optimizer: Optimizer) -> bool:
    """Whether the last ``optimizer.step()`` was skipped because a gradient was inf or nan.

    Args:
        optimizer: an initialised optimizer.

    Returns:
        True or False; False before the first step and where mpinit is disabled.

    Raises:
        RuntimeError: the optimizer is not initialised.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> with mpinit.scale_loss(model(torch.ones(1, 4)).sum() * float("inf"), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> mpinit.step_was_skipped(optimizer), mpinit.step_counts(optimizer), mpinit.loss_scale(optimizer)
        (True, (0, 1), 32768.0)
        >>> mpinit.undo(model)
    """
    session = registry.session_meant(optimizer)
    return session is not None and session.watched(optimizer).counts.consecutive > 0


@ends_at_the_caller
def step_counts(optimizer: Optimizer) -> tuple[int, int]:
    """How many steps were done and how many were skipped since the optimizer was initialised.

    Args:
        optimizer: an initialised optimizer.

    Returns:
        (done, skipped); (0, 0) where mpinit is disabled.

    Raises:
        RuntimeError: the optimizer is not initialised.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O5", verbosity=0)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> mpinit.step_counts(optimizer)
        (1, 0)
        >>> mpinit.undo(model)
    """
    session = registry.session_meant(optimizer)
    if session is None:
        return 0, 0
    counts = session.watched(optimizer).counts
    return counts.good, counts.skipped


def scheduler_step(scheduler: Any, *args: Any) -> None:
    """``scheduler.step(*args)``, unless the optimizer's last step was skipped.

    Args:
        scheduler: a learning-rate scheduler; its ``optimizer`` may be initialised or not.
        *args: for its ``step``, such as the metric of ``ReduceLROnPlateau``.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        >>> with mpinit.scale_loss(model(torch.ones(1, 4)).sum() * float("inf"), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()  # skipped
        >>> mpinit.scheduler_step(scheduler); scheduler.get_last_lr()
        [0.1]
        >>> mpinit.undo(model)
    """
    optimizer = scheduler.optimizer
    if registry.of(optimizer) is None or not step_was_skipped(optimizer):
        scheduler.step(*args)


@ends_at_the_caller
def describe(owner: Any) -> str:
    """What a model or optimizer was initialised with and how it fares: properties, steps done and skipped, scales.

    Where its numbers live, and in which types, :func:`mpinit.audit` says.

    Args:
        owner: an initialised model or optimizer.

    Returns:
        A few lines of text. Scales and counters are read off the device.

    Raises:
        RuntimeError: it is not initialised.

    Example:
        >>> import torch, mpinit
        >>> model = mpinit.initialize(torch.nn.Linear(4, 2), opt_level="O3", verbosity=0)
        >>> print(mpinit.describe(model).splitlines()[1])
          cast_model_type = torch.float16
        >>> mpinit.undo(model)
    """
    owner = registry.unwrapped(owner)
    return "mixed precision is disabled" if owner in registry.disabled else _described(registry.session_of(owner))


def _described(session: Session) -> str:
    lines = [session.describe(), *(f"  {name} = {value}" for name, value in session.settings().items())]
    for index, optimizer in enumerate(session.optimizers):
        counts = session.watched(optimizer).counts
        lines.append(
            f"optimizer {index}, {type(optimizer).__name__}: {counted(counts.good, 'step')} done, {counts.skipped} "
            f"skipped, {counts.consecutive} of them in a row just now"
        )
        known = session.watched(optimizer)
        one_pass = known.scope.one_pass if isinstance(known, ManagedOptimizer) else None
        stepped = one_pass.told() if one_pass is not None else None
        lines += [f"  {stepped}"] if stepped is not None else []
    waiting = session.waiting_weights()
    if waiting:
        are = "waits" if len(waiting) == 1 else "wait"
        lines.append(f"{counted(len(waiting), 'weight')} {are} for an optimizer: mpinit.add_optimizers")
    lines += [
        f"loss {index}: scale {scaler.loss_scale():g}, "
        f"{counted(scaler.unskipped, 'good backward pass', 'good backward passes')} since it moved"
        for index, scaler in enumerate(session.scalers)
    ]
    return "\n".join(lines)
