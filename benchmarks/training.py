"""Training steps of a contender on a task: their time, their time with a compiled model, and their memory."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Final

import torch

from . import footprint, tally
from .case import Case, Facts, Unavailable, clock_for
from .roster import ROSTER
from .tasks import TASKS, Batch

ENOUGH_S: Final = 0.5
# Steps of a compiled model after which nothing is recompiled, and the loss scale has stopped overflowing.
COMPILED_STEPS: Final = 5
# The size of the rehearsal. It is tiny, so that the buffers that it keeps for a next step hardly count.
REHEARSED: Final = {"tensors": 4, "side": 64}


class Training(Case):
    """The time of whole steps: ``forward``, ``backward``, ``finish_gradients``, ``update``."""

    def __init__(self, task: str, contender: str, size: Mapping[str, int], device: str, compiled: bool = False) -> None:
        self.task_row, self.row, self.size, self.device = TASKS[task], ROSTER[contender], size, torch.device(device)
        self.clock, self.compiled = clock_for(device), compiled
        self.batches_used, self.warm_up = 0, 5

    def prepare(self) -> None:
        self.build()
        begin = time.perf_counter()
        for number in range(self.warm_up):
            self.loss = self.step()
            # float16 on a CPU can take a second a step.
            if number and time.perf_counter() - begin > ENOUGH_S:
                break

    def build(self) -> None:
        """Build the contender, without a step."""
        if self.row.needs_network and self.task_row.optimizer_only:
            raise Unavailable("it differs from others only in how a network runs, and the task has no network")
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.manual_seed(0)
        self.contender = self.row.build(self.task_row.build(self.size, self.device))
        if self.compiled:
            self.contender.compile_forward()

    def step(self) -> torch.Tensor:
        contender = self.contender
        loss = contender.forward(*self.next_batch())
        contender.backward(loss)
        contender.finish_gradients()
        contender.update()
        return loss.detach()

    def next_batch(self) -> Batch:
        """Return the next batch of the task."""
        batches = self.contender.task.batches
        self.batches_used += 1
        return batches[(self.batches_used - 1) % len(batches)]

    def seconds(self, loops: int) -> float:
        begin = self.clock()
        for _ in range(loops):
            self.step()
        return self.clock() - begin

    def facts(self, first: bool) -> Facts:
        if not first:
            return {}
        loss = self.loss.item()
        found: Facts = {
            "parameters": self.parameters(),
            "loss_after_warm_up": loss if math.isfinite(loss) else str(loss),
        }
        if not self.row.compiles:
            found["dispatched_ops"] = tally.dispatched_ops(self.step)
        if self.device.type == "cuda":
            found |= {"kernels": tally.kernels(self.step), "host_syncs": tally.host_syncs(self.step)}
        return found

    def parameters(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(p.numel() for p in self.contender.model.parameters())


class MemoryUse(Case):
    """The memory of a training: bytes by kind before the optimizer's step, and the peak of whole steps."""

    def __init__(self, task: str, contender: str, size: Mapping[str, int], device: str) -> None:
        self.rehearsal = Training(task, contender, REHEARSED, device)
        self.training, self.device = Training(task, contender, size, device), torch.device(device)

    def prepare(self) -> None:
        footprint.return_freed_memory()
        # The rehearsal allocates what imports and compilers need once, before the memory is read.
        self.rehearsal.prepare()
        del self.rehearsal
        self.before = footprint.bytes_now(self.device)
        self.training.build()
        self.seconds(1)

    def seconds(self, loops: int) -> float:
        return self.training.seconds(loops)

    def facts(self, first: bool) -> Facts:
        peak = footprint.peak_of(lambda: self.seconds(2), self.device)
        found: Facts = {} if peak is None else {"peak_bytes": peak - self.before}
        return {"parameters": self.training.parameters(), **found, **self.bytes_after_backward()}

    def bytes_after_backward(self) -> Facts:
        """Return the bytes by kind after ``finish_gradients``, each storage once."""
        contender = self.training.contender
        inputs, target = contender.task.batches[0]
        contender.backward(contender.forward(inputs, target))
        contender.finish_gradients()
        sizes = footprint.bytes_by_kind(contender)
        contender.update()
        return {f"bytes_{kind}": size for kind, size in sizes.items()}


class CompiledTraining(Case):
    """The time of whole steps with model and loss as one function, compiled by torch.compile with inductor."""

    def __init__(self, task: str, contender: str, size: Mapping[str, int], device: str) -> None:
        self.inner = Training(task, contender, size, device, compiled=True)

    def prepare(self) -> None:
        self.inner.prepare()
        for _ in range(COMPILED_STEPS):
            self.inner.step()
        self.graphs = self._counted("stats")["unique_graphs"]

    def seconds(self, loops: int) -> float:
        return self.inner.seconds(loops)

    def facts(self, first: bool) -> Facts:
        """Count graphs, graph breaks, and recompilations after overflows that changed the loss scale."""
        task = self.inner.contender.task
        task.batches[:] = [(torch.full_like(inputs, float("inf")), target) for inputs, target in task.batches]
        for _ in range(3):
            self.inner.step()
        return {
            "graphs": self.graphs,
            "graph_breaks": sum(self._counted("graph_break").values()),
            "recompilations": self._counted("stats")["unique_graphs"] - self.graphs,
        }

    @staticmethod
    def _counted(kind: str) -> Mapping[str, int]:
        from torch._dynamo.utils import counters

        return counters[kind]
