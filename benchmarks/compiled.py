"""Training steps whose model and loss torch.compile has compiled with inductor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch._dynamo.utils import counters

from .case import Case, Facts
from .training import Training

# Until guards and generated code have settled, and the first loss scales, which overflow, are behind.
STEPS: Final = 5


class CompiledTraining(Case):
    """As :class:`Training`, with one compiled function for model and loss."""

    def __init__(self, task: str, contender: str, size: Mapping[str, int], device: str) -> None:
        self.inner = Training(task, contender, size, device, compiled=True)

    def prepare(self) -> None:
        self.inner.prepare()
        for _ in range(STEPS):
            self.inner.step()
        self.graphs = counters["stats"]["unique_graphs"]

    def seconds(self, loops: int) -> float:
        return self.inner.seconds(loops)

    def facts(self, first: bool) -> Facts:
        """Graphs and breaks; what is compiled anew when the loss scale has moved because a step overflowed."""
        task = self.inner.contender.task
        task.batches[:] = [(torch.full_like(inputs, float("inf")), target) for inputs, target in task.batches]
        for _ in range(3):
            self.inner.step()
        return {
            "graphs": self.graphs,
            "graph_breaks": sum(counters["graph_break"].values()),
            "recompilations": counters["stats"]["unique_graphs"] - self.graphs,
        }
