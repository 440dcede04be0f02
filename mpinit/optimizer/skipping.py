"""Done and skipped steps of an optimizer: their counts, the log line, and the error after too many skips in a row."""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch.optim import Optimizer

from ..basics.logs import log, warn_user
from ..basics.running import is_capturing
from ..config.plan import Plan
from ..scaling.scaler import LossScaler
from .overflow_log import OverflowLog, OverflowReport
from .params import OptimizerParams

_SKIPS_TO_WARN_OF: Final = 3


class StepCounts(NamedTuple):
    """The numbers of steps done, of steps skipped, and of steps skipped since the last one that was done."""

    good: int
    skipped: int
    consecutive: int


_NONE: Final = StepCounts(0, 0, 0)


@dataclass(eq=False)
class StepCounter:
    """A counter on the host, and on the device where a kernel decides whether to skip."""

    _counted: StepCounts = _NONE
    # Steps, skipped ones, and those since the last good one; each 0-dimensional, for operations on all of them.
    _on_device: tuple[torch.Tensor, ...] = ()
    _since_reading: int = 0

    def read(self) -> StepCounts:
        """Return the counts. Counts of steps that a kernel may have skipped are read from the device."""
        if self._on_device:
            steps, skipped, consecutive = (int(number) for number in torch.stack(self._on_device).tolist())
            good = steps - skipped
            before = self._counted
            run = consecutive + (0 if good else before.consecutive)
            self._counted = StepCounts(before.good + good, before.skipped + skipped, run)
            torch._foreach_zero_(self._on_device)
        return self._counted

    def count(self, skipped: bool) -> None:
        """Count one step."""
        good, all_skipped, consecutive = self.read()
        self._counted = StepCounts(good + (not skipped), all_skipped + skipped, consecutive + 1 if skipped else 0)

    def count_on_device(self, found_inf: torch.Tensor) -> None:
        """Count one step that a kernel does or skips, on the device, so that replays of a CUDA graph count too."""
        if not self._on_device:
            self._one = torch.ones_like(found_inf, dtype=torch.float32)
            self._on_device = tuple(torch.zeros_like(self._one) for _ in range(3))
        torch._foreach_add_(self._on_device, [self._one, found_inf, found_inf])
        self._on_device[2].mul_(found_inf)
        self._since_reading += 1

    def is_due(self, limit: int) -> bool:
        """Return whether ``limit`` steps were counted on the device since this last returned True."""
        if self._since_reading < limit:
            return False
        self._since_reading = 0
        return True


class Skips:
    """The record of an optimizer's steps.

    Attributes:
        counter: of steps done and skipped.
        log: the record of the last overflow.
    """

    def __init__(self, params: OptimizerParams, plan: Plan) -> None:
        self.counter = StepCounter()
        self.log = OverflowLog(params)
        self._plan = plan
        # The last block: its loss, scaler and scale.
        self._last: tuple[torch.Tensor | None, LossScaler | None, torch.Tensor | None] = None, None, None

    def after_block(self, loss: torch.Tensor, scaler: LossScaler, scale: torch.Tensor | None) -> None:
        """Remember the last loss, for the report of an overflow."""
        self._last = (loss.detach() if loss.numel() == 1 else None), scaler, scale

    def count_done(self) -> None:
        """Count a step that was done."""
        self.counter.count(skipped=False)
        self._last = None, None, None  # the next step may use gradients that came through no block

    def count_stepped(self, optimizer: Optimizer) -> None:
        """Count a step that was run: its kernel skips by itself if torch.amp.GradScaler has passed it an overflow."""
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None:
            self.count_done()
        else:
            self.counter.count_on_device(found_inf)

    def count_in_kernel(self, found_inf: torch.Tensor) -> None:
        """Count a step that a kernel has done, or skipped by ``found_inf``."""
        self.counter.count_on_device(found_inf)
        # Reading the counters is a device sync, so it is done once in max_consecutive_skips steps.
        if not is_capturing() and self.counter.is_due(self._plan.max_consecutive_skips):
            self._raise_after_too_many()
            if self.counter.read().consecutive >= _SKIPS_TO_WARN_OF:
                self._warn()

    def skip(self) -> None:
        """Count a step that is not done, and log its overflow.

        Raises:
            RuntimeError: too many steps in a row were skipped.
        """
        report = self._write()
        scaler = self._last[1]
        worst = [f"; worst: {each.name}, {each.share:.0%} of it inf or nan" for each in report.gradients[:1]]
        log.info(
            "Gradient overflow: optimizer.step() was skipped%s%s",
            f"; loss scale now {scaler.loss_scale()}" if scaler is not None and scaler.is_dynamic else "",
            "".join(worst),
        )
        self._last = None, None, None
        self.counter.count(skipped=True)
        self._raise_after_too_many()
        if self.counter.read().consecutive == _SKIPS_TO_WARN_OF:
            self._warn()

    def _write(self) -> OverflowReport:
        loss, scaler, scale = self._last
        self.log.last = self.log.read(scaler, None if scale is None else float(scale), loss)
        return self.log.last

    def _warn(self) -> None:
        """Warn that several steps in a row were skipped, and whether the loss or only gradients were inf or nan."""
        record = self.log.last or self._write()
        count, loss = self.counter.read().consecutive, record.loss
        if loss is not None and not math.isfinite(loss):
            why = f"the loss itself was {loss:g}, so that no loss scale can help. {record.advice}"
        elif self._plan.is_dynamic:
            at = "" if record.scale is None else f" at loss scales down to {record.scale:g}"
            finite = "" if loss is None else f" although the loss was finite ({loss:g})"
            why = (
                f"gradients were inf or nan{at}{finite}. At the beginning of a training that is normal: the dynamic "
                f"scale comes down until gradients fit. If it goes on: {record.advice}"
            )
        else:
            why = (
                "gradients were inf or nan: the data, or a training that diverges. "
                f"{record.advice}; skip_nonfinite=False lets them in"
            )
        # A dynamic scale skips steps in healthy trainings, too: no exception under "-W error".
        (log.warning if self._plan.is_dynamic else warn_user)(f"{count} steps in a row were skipped because {why}")

    def _raise_after_too_many(self) -> None:
        limit = self._plan.max_consecutive_skips
        if self.counter.read().consecutive < limit:
            return
        record = self.log.last or self._write()
        names = ", ".join(record.parameters[:3]) or "gradients cleared since"
        at = "" if record.scale is None else f", at a loss scale of {record.scale:g}"
        why = ""
        if self._plan.is_dynamic:
            why = "no loss scale helps, so inf or nan are computed in forward, the loss or an operation's gradient. "
        raise RuntimeError(
            f"{limit} steps in a row were skipped because gradients were inf or nan, in {names}{at}: "
            f"{why}{record.advice}; max_consecutive_skips moves the limit"
        )
