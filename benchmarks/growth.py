"""The growth of mpinit's cost with a model's size: time per training step and of ``initialize``, at O2 with Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from .case import Case, Facts, clock_for
from .footprint import resident_bytes


class _AllGradients(torch.autograd.Function):
    """A function whose backward returns gradients made beforehand for all parameters, times the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, sources: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.sources = sources
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Any, ...]:
        return None, *torch._foreach_mul(ctx.sources, incoming[0].item() / 2**17)


class Part:
    """A model without a forward pass, its optimizer, and gradients that were made beforehand."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = [*model.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-3, fused=True)
        self.sources: list[Tensor] = []

    def loss(self) -> Tensor:
        if not self.sources:
            # One source for all parameters of a shape: they are no part of the training's memory.
            by_shape = {p.shape: torch.full_like(p, 1e-3, requires_grad=False) for p in self.parameters}
            self.sources = [by_shape[p.shape] for p in self.parameters]
        result: Tensor = _AllGradients.apply(self.sources, *self.parameters)  # type: ignore[no-untyped-call]
        return result


def weights(count: int, elements: int) -> nn.Module:
    """Make weights without layers; constant ones, because random numbers would need more time than the measurement."""
    side = max(1, math.isqrt(elements))
    return nn.ParameterList(torch.full((side, side), 0.5) for _ in range(count))


def layers(count: int) -> nn.Module:
    """Make tiny Linear layers."""
    return nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(count - 1)))


@dataclass(frozen=True)
class Axis:
    """A quantity that grows, such as the number of modules.

    Attributes:
        title: the text in tables.
        points: the sizes to measure, for a quick and for a full run.
        parts: makes the models of one training of a size.
        sessions: the number of sessions that are alive, of which one is timed.
        steps: the number of steps before the timed ones.
        flat: whether the time of a step must not grow at all.
        minutes: see :class:`~benchmarks.suite.Workload`.
    """

    title: str
    points: Mapping[str, tuple[int, ...]]
    parts: Callable[[int], list[nn.Module]]
    sessions: Callable[[int], int] = lambda point: 1
    steps: Callable[[int], int] = lambda point: 3
    flat: bool = False
    minutes: float = 0.4


M: Final = 1_000_000
TINY: Final = 16
AXES: Final[Mapping[str, Axis]] = {
    "parameters": Axis(
        "parameters, in 16 tensors",
        {"quick": (10_000, 100_000), "full": (M, 4 * M, 16 * M, 48 * M)},
        lambda point: [weights(16, point // 16)],
        steps=lambda point: 1,
    ),
    "tensors": Axis(
        "tensors of 16 numbers",
        {"quick": (10, 100), "full": (10, 100, 1_000, 10_000)},
        lambda point: [weights(point, TINY)],
    ),
    "modules": Axis(
        "modules, Linear layers of 2 x 2",
        {"quick": (10, 100), "full": (100, 1_000, 5_000)},
        lambda point: [layers(point)],
    ),
    "optimizers": Axis(
        "optimizers of one model, stepped in turn",
        {"quick": (1, 5), "full": (1, 5, 20, 50)},
        lambda point: [weights(2, TINY) for _ in range(point)],
    ),
    "sessions": Axis(
        "sessions alive, one of them stepped",
        {"quick": (1, 10), "full": (1, 10, 100, 500)},
        lambda point: [weights(2, TINY)],
        sessions=lambda point: point,
        flat=True,
    ),
    "steps": Axis(
        "steps done before",
        {"quick": (1, 100), "full": (1, 100, 3_000)},
        lambda point: [weights(2, TINY)],
        steps=lambda point: point,
        flat=True,
    ),
}


class Growth(Case):
    """The time of mpinit's part of a step (``scale_loss`` and ``step``), and of ``initialize``."""

    def __init__(self, axis: str, point: int, device: str) -> None:
        self.axis, self.point, self.device, self.clock = AXES[axis], point, torch.device(device), clock_for(device)
        self.initialize_s = 0.0
        self.kept: list[Any] = []

    def prepare(self) -> None:
        self.start_bytes = resident_bytes()
        for _ in range(self.axis.sessions(self.point)):
            self._add_session()
        for _ in range(self.axis.steps(self.point)):
            self._step()

    def _add_session(self) -> None:
        import mpinit

        with self.device:
            self.parts = [Part(model) for model in self.axis.parts(self.point)]
        models, optimizers = [part.model for part in self.parts], [part.optimizer for part in self.parts]
        begin = self.clock()
        mpinit.initialize(models, optimizers, "O2")
        self.initialize_s += self.clock() - begin
        self.kept.append((models, optimizers))

    def _step(self) -> float:
        import mpinit

        clock, optimizers = self.clock, [part.optimizer for part in self.parts]
        loss = torch.stack([part.loss() for part in self.parts]).sum()
        start = clock()
        block = mpinit.scale_loss(loss, optimizers)
        scaled = block.__enter__()
        spent = clock() - start
        scaled.backward()  # type: ignore[no-untyped-call]
        start = clock()
        block.__exit__(None, None, None)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return spent + clock() - start

    def seconds(self, loops: int) -> float:
        return sum(self._step() for _ in range(loops))

    def facts(self, first: bool) -> Facts:
        return {
            "point": self.point,
            "tensors": sum(len(part.parameters) for part in self.parts),
            "parameters": sum(p.numel() for part in self.parts for p in part.parameters),
            "initialize_s": self.initialize_s,
            "resident_bytes": resident_bytes() - self.start_bytes,
        }
