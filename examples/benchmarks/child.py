"""One contender on one workload, as its process holds it: prepare, take turns, be looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from . import footprint, tally
from .clock import make_clock
from .contenders import Contender, Unavailable
from .roster import ROSTER
from .workloads import WORKLOADS

Answer = dict[str, Any]


class Child:
    """Builds the contender when asked to prepare; every verb answers with figures."""

    contender: Contender

    def __init__(self, workload: str, contender: str, size: dict[str, int], device: str, seed: int) -> None:
        self.name, self.workload, self.row, self.size = workload, WORKLOADS[workload], ROSTER[contender], size
        self.device, self.seed = torch.device(device), seed
        self.steps_done = 0

    def prepare(self, steps: int) -> Answer:
        """Build, and train a fixed number of steps, which are the warm-up too."""
        if self.row.needs_network and self.workload.optimizer_only:
            raise Unavailable("it differs in how a network runs, and there is none")
        if self.row.only and self.name not in self.row.only:
            raise Unavailable(f"it is there for {', '.join(self.row.only)} alone")
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.manual_seed(self.seed)
        self.contender = self.row.build(self.workload.build(self.size, self.device))
        losses = [self.step() for _ in range(steps)]
        parameters = sum(p.numel() for p in self.contender.model.parameters())
        loss = losses[-1].item()
        return {"parameters": parameters, "loss": loss if math.isfinite(loss) else str(loss)}

    def step(self, mark: Callable[[], None] = lambda: None) -> torch.Tensor:
        contender = self.contender
        inputs, target = contender.task.batches[self.steps_done % len(contender.task.batches)]
        self.steps_done += 1
        loss = contender.forward(inputs, target)
        mark()
        contender.backward(loss)
        mark()
        contender.settle()
        contender.update()
        mark()
        return loss.detach()

    def turn(self, steps: int, untimed: int) -> Answer:
        """Milliseconds per step over ``steps`` steps, after a few untimed ones that warm caches up again."""
        clock = make_clock(self.device)
        for _ in range(untimed):
            self.step()
        begin = clock.now()
        for _ in range(steps):
            clock.start_step()
            self.step(clock.mark)
        total = (clock.now() - begin) / steps
        answer = {"total": total, **clock.phases()}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return answer

    def inspect(self) -> Answer:
        """Bytes by kind and counts per step."""
        on_cuda = self.device.type == "cuda"
        return {
            "memory": self.memory(),
            "ops": None if self.row.compiles else tally.dispatched_ops(self.step),
            "kernels": tally.kernels(self.step) if on_cuda else None,
            "host_syncs": tally.host_syncs(self.step) if on_cuda else None,
        }

    def memory(self) -> Answer:
        """Bytes by kind, between steps and after backward, and the peaks of a whole step and of its last part."""
        contender, (inputs, target) = self.contender, self.contender.task.batches[0]

        def until_backward() -> None:
            contender.backward(contender.forward(inputs, target))

        def step() -> None:
            until_backward()
            contender.settle()
            contender.update()

        steady = footprint.held(contender)
        # The first step is there so that the releases of what a contender keeps from step to step are seen too.
        _, *levels = footprint.trace([step, until_backward, contender.settle, contender.update], self.device)
        peaks = [sum(steady.values()) + level.peak - levels[0].start for level in levels]
        until_backward()
        contender.settle()
        after_backward = footprint.held(contender)
        contender.update()
        return {"steady": steady, "after_backward": after_backward, "peak_step": max(peaks[1:]), "peak": max(peaks)}
