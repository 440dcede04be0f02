"""Steps done and skipped, counted without waiting for the device; and optimizers with which nothing else is done."""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer


class StepCounts(NamedTuple):
    """Steps done, skipped, and skipped since the last one done."""

    good: int
    skipped: int
    consecutive: int


_NONE: Final = StepCounts(0, 0, 0)


@dataclass(eq=False)
class StepCounter:
    """Counts on the host, and on the device where a kernel decides whether to skip."""

    _counted: StepCounts = _NONE
    _on_device: torch.Tensor | None = None
    _since_reading: int = 0

    def read(self) -> StepCounts:
        """The counts; those of steps that skipped inside a kernel are read from the device."""
        if self._on_device is not None:
            good, skipped, consecutive = (int(number) for number in self._on_device.tolist())
            before = self._counted
            run = consecutive + (0 if good else before.consecutive)
            self._counted = StepCounts(before.good + good, before.skipped + skipped, run)
            self._on_device.zero_()
        return self._counted

    def count(self, skipped: bool) -> None:
        good, all_skipped, consecutive = self.read()
        self._counted = StepCounts(good + (not skipped), all_skipped + skipped, consecutive + 1 if skipped else 0)

    def count_on_device(self, found_inf: torch.Tensor) -> None:
        """One step that a kernel does or skips: a captured graph counts its replays too."""
        if self._on_device is None:
            self._on_device = torch.zeros(3, dtype=torch.float32, device=found_inf.device)
        skipped = (found_inf > 0).float()
        self._on_device[0].add_(1 - skipped)
        self._on_device[1].add_(skipped)
        self._on_device[2].add_(skipped).mul_(skipped)
        self._since_reading += 1

    def is_due(self, limit: int) -> bool:
        """Whether ``limit`` steps were counted on the device since this was last true: reading waits for it."""
        if self._since_reading < limit:
            return False
        self._since_reading = 0
        return True


@dataclass(eq=False)
class CountedOptimizer:
    """An optimizer that is left as it is: hooks of torch's own count its steps."""

    optimizer: Optimizer
    counter: StepCounter = field(default_factory=StepCounter)

    def parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"]))
