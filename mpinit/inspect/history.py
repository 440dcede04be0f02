"""The last steps of an optimizer: loss, scale, skips and gradient norm, without waiting for the device."""

from __future__ import annotations

import csv
import json
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from . import access

_FIELDS: Final = ("step", "loss", "scale", "skipped", "gradient_norm", "good", "skipped_so_far")


@dataclass
class _Row:
    """One step as it was seen: tensors that were not read yet, or numbers."""

    step: int
    losses: list[torch.Tensor]
    scale: torch.Tensor | None
    norm: torch.Tensor | None
    skipped: bool | torch.Tensor


@final
class History:
    """Loss, scale, whether it was skipped, gradient norm and counts of an optimizer's last steps.

    Everything stays on its device until it is read. The loss is the mean of those scaled since the step before, the
    scale that of the first of them, and the norm that of all gradients after the last backward pass, before clipping.

    Args:
        optimizer: an initialised optimizer.
        capacity: how many steps are kept; the oldest go. Default 1000.
        writer: a TensorBoard ``SummaryWriter``, or anything with its ``add_scalar(tag, value, step)``. What is new is
            written to it whenever the history is read, flushed or closed, and before a step would be lost.

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

    def __init__(self, optimizer: Optimizer, capacity: int = 1000, writer: Any = None) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity={capacity!r}: give a number of steps from 1 up")
        self._of = access.session_of(optimizer), optimizer
        self._rows: deque[_Row] = deque(maxlen=capacity)
        self._writer = writer
        self._written = 0
        self._steps = 0
        self._lost_skipped: int | torch.Tensor = 0
        self._losses: list[torch.Tensor] = []
        self._scale: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        access.observers_of(*self._of).append(self)

    # -- what is shown ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def backward_ended(self, loss: torch.Tensor, scaler: Any) -> None:
        """A scaled backward pass is over."""
        if not self._losses:
            self._scale = access.scale_of(scaler)
        self._losses.append(loss.detach().float().mean().clone())
        session, optimizer = self._of
        found = (access.gradient_of(session, weight) for weight in access.parameters_of(session, optimizer))
        gradients = [access.dense(gradient) for gradient in found if gradient is not None]
        self._norm = torch.nn.utils.get_total_norm(gradients) if gradients else None

    def step_ended(self, skipped: bool | torch.Tensor) -> None:
        """A step is over."""
        kept = skipped.clone() if isinstance(skipped, torch.Tensor) else skipped
        if len(self._rows) == self._rows.maxlen:
            self._let_go_of_oldest()
        self._steps += 1
        self._rows.append(_Row(self._steps, self._losses, self._scale, self._norm, kept))
        self._losses, self._scale, self._norm = [], None, None

    def _let_go_of_oldest(self) -> None:
        oldest = self._rows[0]
        if self._writer is not None and oldest.step > self._written:
            self.flush()
        # A count on the device goes on being one.
        skipped: Any = oldest.skipped > 0 if isinstance(oldest.skipped, torch.Tensor) else oldest.skipped
        self._lost_skipped = self._lost_skipped + (skipped.int() if isinstance(skipped, torch.Tensor) else int(skipped))

    # -- reading ------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """The steps kept, oldest first, as plain numbers; waits for the device.

        Returns:
            For each ``step``, ``loss``, ``scale``, ``skipped``, ``gradient_norm``, and ``good`` and ``skipped_so_far``,
            which count from when the history began.
        """
        rows = self._read()
        self._write(rows)
        return rows

    def _read(self) -> list[dict[str, Any]]:
        rows = []
        skipped_so_far = int(self._lost_skipped)
        for row in self._rows:
            skipped = bool(row.skipped > 0) if isinstance(row.skipped, torch.Tensor) else row.skipped
            skipped_so_far += skipped
            losses = [float(loss) for loss in row.losses]
            values = (
                row.step,
                sum(losses) / len(losses) if losses else math.nan,
                math.nan if row.scale is None else float(row.scale),
                skipped,
                math.nan if row.norm is None else float(row.norm),
                row.step - skipped_so_far,
                skipped_so_far,
            )
            rows.append(dict(zip(_FIELDS, values, strict=True)))
        return rows

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if self._writer is None:
            return
        for row in rows:
            if row["step"] > self._written:
                for name in _FIELDS[1:]:
                    self._writer.add_scalar(f"mpinit/{name}", float(row[name]), row["step"])
                self._written = row["step"]

    def flush(self) -> None:
        """Write to the writer what was not written yet."""
        if self._writer is not None:
            self._write(self._read())

    def __len__(self) -> int:
        return len(self._rows)

    def to_csv(self, path: str | Path) -> None:
        """Write the rows as CSV, with a header."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _FIELDS)
            writer.writeheader()
            writer.writerows(self.rows())

    def to_json(self, path: str | Path | None = None) -> str:
        """The rows as a JSON list; inf and nan are null. Written to ``path`` where one is given."""
        plain = [
            {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
            for row in self.rows()
        ]
        text = json.dumps(plain)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop recording; what was kept can still be read. A second call does nothing."""
        self.flush()
        observers = access.observers_of(*self._of)
        if self in observers:
            observers.remove(self)

    def __enter__(self) -> History:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
