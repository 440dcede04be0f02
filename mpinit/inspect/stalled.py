"""Parameters that do not move in steps that are done: what an audit foresees, measured."""

from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..checks import ends_at_the_caller
from ..session import Session
from .numbers import dense, kept_values


@final
class _Movement:
    """Which elements have had a gradient, and which have moved, since it began to look."""

    def __init__(self, session: Session, optimizer: Optimizer) -> None:
        self._session = session
        self._steps: list[bool | torch.Tensor] = []
        weights = [weight for weight in session.watched(optimizer).parameters() if weight.requires_grad]
        self._start = {weight: self._now(weight).clone() for weight in weights}
        self._moved = {weight: torch.zeros_like(old, dtype=torch.bool) for weight, old in self._start.items()}
        self._meant = {weight: torch.zeros_like(moved) for weight, moved in self._moved.items()}

    def _now(self, weight: nn.Parameter) -> torch.Tensor:
        return dense(kept_values(weight, self._session))

    def backward_ended(self, loss: torch.Tensor, scaler: Any) -> None:
        return

    @torch.no_grad()
    def step_ended(self, skipped: bool | torch.Tensor) -> None:
        self._steps.append(skipped)
        for weight, start in self._start.items():
            gradient = weight.grad
            if gradient is not None:
                there = dense(gradient.to_dense() if gradient.is_sparse else gradient) != 0
                self._meant[weight] |= there & ~torch.as_tensor(skipped > 0, device=there.device)
            self._moved[weight] |= self._now(weight) != start

    def result(self) -> dict[str, float]:
        """Dotted name -> share."""
        if all(bool(skipped) for skipped in self._steps):
            raise RuntimeError(
                "no step was done since mpinit.stalled(optimizer, start=True): call it again after some "
                "optimizer.step()"
            )
        shares = {
            self._session.names.of(weight): float((~self._moved[weight])[meant].double().mean())
            for weight, meant in self._meant.items()
            if bool(meant.any())
        }
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


@ends_at_the_caller
def stalled(optimizer: Optimizer, start: bool = False) -> dict[str, float] | None:
    """Measure what :func:`mpinit.audit` foresees: which parameters do not move, because updates are lost to rounding.

    Called with ``start=True`` it records what every parameter holds now, and is told of every step until it is called
    without; in between a step costs a look at every element. Elements that never had a gradient (the rows of an
    embedding that no batch used) don't count.

    Args:
        optimizer: an initialised optimizer.
        start: True begins (anew); False, the default, ends, and gives the result.

    Returns:
        None at the start; then dotted name -> share of the elements with a gradient that never moved, largest first.

    Raises:
        RuntimeError: it was not started, no step was done since, or the optimizer is not initialised.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.LayerNorm(4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        >>> model, optimizer = mpinit.initialize(model, optimizer, "O3", cast_model_type="bf16", verbosity=0)
        >>> mpinit.stalled(optimizer, start=True)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     with mpinit.scale_loss(model(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).square().mean(), optimizer) as loss:
        ...         loss.backward()
        ...     optimizer.step()
        >>> mpinit.stalled(optimizer)["weight"]
        1.0
        >>> mpinit.undo(model)
    """
    session = registry.session_of(optimizer)
    observers = session.watched(optimizer).observers
    running = next((observer for observer in observers if isinstance(observer, _Movement)), None)
    if start:
        observers.append(_Movement(session, optimizer))
        result = None
    elif running is None:
        raise RuntimeError("nothing to compare with: call mpinit.stalled(optimizer, start=True) some steps before")
    else:
        result = running.result()
    if running is not None:
        observers.remove(running)
    return result
