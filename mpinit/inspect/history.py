"""The last steps of an optimizer: loss, scale, skips and gradient norm, without waiting for the device."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self, final

import torch
from torch.optim import Optimizer

from .. import registry
from .numbers import dense


@dataclass
class _Row:
    """One step as it was seen: tensors that were not read yet, or numbers."""

    losses: list[torch.Tensor] = field(default_factory=list)
    scale: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    skipped: bool | torch.Tensor = False


@final
class History:
    """Loss, scale, whether it was skipped, and gradient norm of an optimizer's last steps.

    Everything stays on its device until it is read. The loss is the mean of those scaled since the step before, the
    scale that of the first of them, and the norm that of all gradients after the last backward pass, before clipping.

    Args:
        optimizer: an initialised optimizer.
        capacity: how many steps are kept; the oldest go. Default 1000.

    Raises:
        RuntimeError: the optimizer is not initialised.
        ValueError: a capacity below 1.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, "O2", verbosity=0)
        >>> with mpinit.History(optimizer) as history:
        ...     with mpinit.scale_loss(model(torch.ones(1, 2)).sum() * 0.1, optimizer) as scaled_loss:
        ...         scaled_loss.backward()
        ...     optimizer.step()
        >>> row = history.rows()[0]
        >>> row["step"], row["scale"], row["skipped"], round(row["gradient_norm"], 3)
        (1, 65536.0, False, 0.141)
        >>> mpinit.undo(model)
    """

    def __init__(self, optimizer: Optimizer, capacity: int = 1000) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity={capacity!r}: give a number of steps from 1 up")
        self._managed = registry.session_of(optimizer).watched(optimizer)
        self._rows: deque[_Row] = deque(maxlen=capacity)
        # The step that is to come, and how many are kept no more.
        self._next = _Row()
        self._lost = 0
        self._managed.observers.append(self)

    # -- what is shown ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def backward_ended(self, loss: torch.Tensor, scaler: Any) -> None:
        """A scaled backward pass is over."""
        if not self._next.losses:
            self._next.scale = scaler.scale_now()
        self._next.losses.append(loss.detach().float().mean().clone())
        gradients = [dense(weight.grad) for weight in self._managed.parameters() if weight.grad is not None]
        self._next.norm = torch.nn.utils.get_total_norm(gradients) if gradients else None

    def step_ended(self, skipped: bool | torch.Tensor) -> None:
        """A step is over."""
        self._next.skipped = skipped.clone() if isinstance(skipped, torch.Tensor) else skipped
        self._lost += len(self._rows) == self._rows.maxlen
        self._rows.append(self._next)
        self._next = _Row()

    # -- reading ------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """The steps kept, oldest first, as plain numbers; waits for the device.

        Returns:
            For each ``step`` (1 is the first since the history began), ``loss``, ``scale``, ``skipped`` and
            ``gradient_norm``.
        """
        rows = []
        for step, row in enumerate(self._rows, self._lost + 1):
            losses = [float(loss) for loss in row.losses]
            rows.append(
                {
                    "step": step,
                    "loss": sum(losses) / len(losses) if losses else math.nan,
                    "scale": math.nan if row.scale is None else float(row.scale),
                    "skipped": bool(row.skipped > 0),
                    "gradient_norm": math.nan if row.norm is None else float(row.norm),
                }
            )
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop recording; what was kept can still be read. A second call does nothing."""
        if self in self._managed.observers:
            self._managed.observers.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()
