"""Steps of training: a contender on a task."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from . import footprint, tally
from .case import Case, Facts, Unavailable, clock_for
from .roster import ROSTER
from .tasks import TASKS

ENOUGH_S: Final = 0.5


class Training(Case):
    """Whole steps: forward, backward, gradients made ready, update."""

    def __init__(
        self,
        task: str,
        contender: str,
        size: Mapping[str, int],
        device: str,
        compiled: bool = False,
        warm_up: int = 5,
    ) -> None:
        self.task_row, self.row, self.size, self.device = TASKS[task], ROSTER[contender], size, torch.device(device)
        self.clock, self.compiled = clock_for(device), compiled
        self.steps_done, self.warm_up = 0, warm_up

    def prepare(self) -> None:
        if self.row.needs_network and self.task_row.optimizer_only:
            raise Unavailable("it differs in how a network runs, and there is none")
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.manual_seed(0)
        self.start_peak = peak_bytes(self.device)
        self.contender = self.row.build(self.task_row.build(self.size, self.device))
        if self.compiled:
            self.contender.compile_forward()
        begin = time.perf_counter()
        for number in range(self.warm_up):
            self.loss = self.step()
            # float16 on a CPU can take a second a step.
            if number and time.perf_counter() - begin > ENOUGH_S:
                break

    def step(self) -> torch.Tensor:
        contender = self.contender
        inputs, target = contender.task.batches[self.steps_done % len(contender.task.batches)]
        self.steps_done += 1
        loss = contender.forward(inputs, target)
        contender.backward(loss)
        contender.settle()
        contender.update()
        return loss.detach()

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
            "parameters": sum(p.numel() for p in self.contender.model.parameters()),
            "loss_after_warm_up": loss if math.isfinite(loss) else str(loss),
            "process_peak_bytes": peak_bytes(self.device) - self.start_peak,
        }
        # Counting goes through a mode of torch's, and what is kept for it would be counted as held.
        found |= self.bytes_after_backward()
        if not self.row.compiles:
            found["dispatched_ops"] = tally.dispatched_ops(self.step)
        if self.device.type == "cuda":
            found |= {"kernels": tally.kernels(self.step), "host_syncs": tally.host_syncs(self.step)}
        return found

    def bytes_after_backward(self) -> Facts:
        """Bytes held by kind when the optimizer is about to step, each storage once."""
        contender, (inputs, target) = self.contender, self.contender.task.batches[0]
        contender.backward(contender.forward(inputs, target))
        contender.settle()
        held = footprint.held(contender)
        contender.update()
        return {f"bytes_{kind}": size for kind, size in held.items()}


def peak_bytes(device: torch.device) -> int:
    """The most that this process has held so far, by the system's or CUDA's own count; 0 where none is kept."""
    return int(torch.cuda.max_memory_allocated()) if device.type == "cuda" else _status("VmHWM")


def resident_bytes() -> int:
    """What this process holds, by the system's count; 0 where none is kept."""
    return _status("VmRSS")


def _status(name: str) -> int:
    status = Path("/proc/self/status")
    found = re.search(rf"{name}:\s*(\d+)", status.read_text()) if status.exists() else None
    return int(found.group(1)) * 1024 if found else 0
