"""What comes before the first step: ``initialize`` and ``import mpinit``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from . import footprint
from .case import Case, Facts, clock_for

LEVELS: Final[Mapping[str, dict[str, Any]]] = {
    "o1": {"opt_level": "O1"},
    "o2": {"opt_level": "O2"},
    "o2_again": {"opt_level": "O2"},
    "o2_split": {"opt_level": "O5", "master_weights": "split"},
    "o3": {"opt_level": "O3"},
}


class Initialize(Case):
    """``initialize`` on square linear layers, a new model each time.

    Args:
        level: a row of ``LEVELS``.
        size: ``layers`` and their ``side``.
        weights: the type that the model comes in.
    """

    def __init__(self, level: str, size: Mapping[str, int], device: str, weights: torch.dtype = torch.float32) -> None:
        self.keywords, self.layers, self.side = LEVELS[level], size["layers"], size["side"]
        self.device, self.clock, self.dtype = torch.device(device), clock_for(device), weights

    def prepare(self) -> None:
        self.seconds(2)

    def _build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        with self.device:
            layers = [nn.Linear(self.side, self.side, bias=False, dtype=self.dtype) for _ in range(self.layers)]
        model = nn.Sequential(*layers)
        return model, torch.optim.Adam(model.parameters(), fused=True)

    def _initialize(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        import mpinit

        mpinit.initialize(model, optimizer, verbosity=0, **self.keywords)

    def seconds(self, loops: int) -> float:
        import mpinit

        total = 0.0
        for _ in range(loops):
            model, optimizer = self._build()
            begin = self.clock()
            self._initialize(model, optimizer)
            total += self.clock() - begin
            mpinit.undo(model)
        return total

    def facts(self, first: bool) -> Facts:
        """Bytes before and after ``initialize``, at its peak, and what a state dict adds."""
        if not first:
            return {}
        made: list[Any] = []
        kept: list[Any] = []
        stages = [
            lambda: made.extend(self._build()),
            lambda: self._initialize(*made),
            lambda: kept.append(made[0].state_dict()),
            lambda: None,
        ]
        _, initialize, state_dict, end = footprint.trace(stages, self.device)
        return {
            "parameters": self.layers * self.side**2,
            "modules": self.layers + 1,
            "bytes_before": initialize.start,
            "bytes_after": state_dict.start,
            "bytes_peak": initialize.peak,
            "bytes_state_dict": end.start - state_dict.start,
        }


_IMPORT: Final = "import time, torch\nbegin = time.process_time()\nimport mpinit\nprint(time.process_time() - begin)"


class Import(Case):
    """``import mpinit`` behind ``import torch``, in an interpreter of its own each time."""

    def prepare(self) -> None:
        """Nothing: the interpreter is new."""

    def seconds(self, loops: int) -> float:
        command, root = [sys.executable, "-c", _IMPORT], Path(__file__).parents[1]
        runs = [subprocess.run(command, check=True, capture_output=True, text=True, cwd=root) for _ in range(loops)]
        return sum(float(run.stdout) for run in runs)

    def facts(self, first: bool) -> Facts:
        return {}
