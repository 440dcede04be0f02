"""The time before the first step: ``initialize`` and ``import mpinit``."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from . import footprint
from .case import Case, Facts, clock_for
from .machine import ENVIRONMENT

LEVELS: Final[Mapping[str, dict[str, Any]]] = {
    "o1": {"opt_level": "O1"},
    "o2": {"opt_level": "O2"},
    "o2_again": {"opt_level": "O2"},
    "o2_split": {"opt_level": "O5", "master_weights": "split"},
    "o3": {"opt_level": "O3"},
}


class Initialize(Case):
    """The time of ``initialize`` for square linear layers, with a new model each time.

    Args:
        level: a row of ``LEVELS``.
        size: ``layers`` and their ``side``.
        weights: the dtype of the model before ``initialize``.
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

        mpinit.initialize(model, optimizer, **self.keywords)

    def seconds(self, loops: int) -> float:
        import mpinit

        total = 0.0
        for _ in range(loops):
            model, optimizer = self._build()
            # Garbage of earlier repetitions would otherwise decide whether the collector runs while the clock does.
            gc.collect()
            begin = self.clock()
            self._initialize(model, optimizer)
            total += self.clock() - begin
            mpinit.undo(model)
        return total

    def facts(self, first: bool) -> Facts:
        """Return the bytes before and after ``initialize``, at its peak, and those that a state dict adds."""
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


# Each import runs in a fork of a process that has imported torch, because importing torch lasts ten times as long. The
# time includes pages that a fork copies when they are written to. With ENVIRONMENT's settings these would be most of
# the time, so the process has none of them. The first import writes bytecode.
_IMPORT: Final = """
import os, sys, time, torch
for line in sys.stdin:
    if os.fork() == 0:
        begin = time.process_time()
        import mpinit
        print(time.process_time() - begin, flush=True)
        os._exit(0)
    os.wait()
"""


class Import(Case):
    """The time of ``import mpinit`` after ``import torch``, in a new process each time."""

    def prepare(self) -> None:
        command, root = [sys.executable, "-c", _IMPORT], Path(__file__).parents[1]
        without = {"PYTHONDONTWRITEBYTECODE", *ENVIRONMENT}
        environment = {name: value for name, value in os.environ.items() if name not in without}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(command, **pipes, text=True, cwd=root, env=environment)
        self.seconds(1)

    def seconds(self, loops: int) -> float:
        return sum(self._import() for _ in range(loops))

    def _import(self) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.process.communicate()[1])
        return float(line)

    def facts(self, first: bool) -> Facts:
        self.process.communicate()
        return {}
