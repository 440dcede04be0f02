"""A tiny model under mpinit and the law's picture of it, for the state machine of the law."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from law_numbers import MOMENTUM, RATE, Law, Number
from random_world import DTYPES
from reference_loop import BF16, F16, F32, Scaler, stored
from torch import nn
from torch.optim import SGD, Optimizer

import mpinit

# "long" has several of a split master's blocks, the last of them not full; "late" is in no optimizer at first.
SIZES = {"a": 3, "long": 300, "b": 3, "kept": 3, "late": 3}
SCALE = 64.0


@dataclass(frozen=True)
class Setup:
    """How a run is set up; ``half`` is what is computed in; ``masters`` counts at O2, as ``master_weights``."""

    level: str
    half: str
    masters: Any
    loss_scale: Any
    momentum: bool
    optimizers: int

    @property
    def casts(self) -> bool:
        """Whether weights are cast."""
        return self.level in ("O2", "O3") and not self.stays_float32

    @property
    def stays_float32(self) -> bool:
        """Whether weights are 16-bit inside forwards alone."""
        return self.masters == "model"

    @property
    def has_masters(self) -> bool:
        """Whether weights that are cast have masters."""
        return self.level == "O2" and bool(self.masters) and not self.stays_float32

    @property
    def splits(self) -> bool:
        """Whether masters are split."""
        return self.level == "O2" and self.masters == "split"

    @property
    def keywords(self) -> dict[str, Any]:
        """What ``initialize`` is told."""
        given: dict[str, Any] = {"opt_level": self.level, "loss_scale": self.loss_scale, "verbosity": 0}
        given["max_consecutive_skips"] = 10**6
        if self.loss_scale == "dynamic":
            given |= {"init_loss_scale": SCALE, "max_loss_scale": SCALE * 4, "min_loss_scale": 0.5}
            given |= {"growth_interval": 2}
        if self.level == "O1":
            given["patch_torch_functions_type"] = DTYPES[self.half]
        elif self.level in ("O2", "O3"):
            given |= {"cast_model_type": DTYPES[self.half], "keep_fp32": ["kept"]}
        if self.level == "O2":
            given["master_weights"] = self.masters
        return given

    def scaler(self) -> Scaler:
        """What the scaler starts as."""
        dynamic = self.loss_scale == "dynamic"
        return Scaler(dynamic, SCALE if dynamic else self.loss_scale, 1, 2, 0.5, SCALE * 4)

    def weight_type(self, name: str) -> str:
        """What the model computes with."""
        return self.half if self.casts and name != "kept" else F32


class Shrinking(SGD):
    """SGD with a second method that writes to its parameters, as schedule-free and two-step optimizers have."""

    steps_per_parameter = True

    @torch.no_grad()
    def shrink(self) -> None:
        """Halve everything."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


class Vector(nn.Module):
    """A weight vector that comes out as it is, by way of a function that O1 casts."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values, dtype=torch.float32).view(-1, 1))

    def forward(self, one: torch.Tensor) -> torch.Tensor:
        """``weight * 1``."""
        return nn.functional.linear(one, self.weight).view(-1)


class Vectors(nn.Module):
    """All of them."""

    def __init__(self) -> None:
        super().__init__()
        for name, values in start_values().items():
            self.add_module(name, Vector(values))

    def forward(self, one: torch.Tensor, names: list[str]) -> list[torch.Tensor]:
        """The vectors asked for."""
        return [self.get_submodule(name)(one) for name in names]


class World:
    """Model and optimizers, built the way a script builds them."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = Vectors()
        # The same objects from beginning to end, whatever is done to them.
        self._weights: dict[str, Any] = {name: self.model.get_submodule(name).weight for name in SIZES}
        last = setup.optimizers - 1
        self.homes = [["a", "long"]] if last else [["a", "long", "b", "kept"]]
        if last:
            self.homes.append(["b", "kept"])
        momentum = MOMENTUM if setup.momentum else 0.0
        self.optimizers: list[Optimizer] = [
            Shrinking([self.weight(name) for name in names], lr=RATE, momentum=momentum) for names in self.homes
        ]
        self.initialize()

    def initialize(self) -> None:
        """``mpinit.initialize``, also again after an undo."""
        mpinit.initialize(self.model, self.optimizers, **self.setup.keywords)

    def weight(self, name: str) -> nn.Parameter:
        """The model's parameter."""
        return self._weights[name]

    def law(self) -> Law:
        """The law's picture of the start."""
        numbers, values = {}, start_values()
        for name in SIZES:
            numbers[name] = Number(name, values[name], self.setup.weight_type(name), self.setup.splits)
        law = Law(
            numbers,
            [[list(names)] for names in self.homes],
            self.setup.scaler(),
            self.setup.momentum,
            steps=[(0, 0)] * len(self.optimizers),
        )
        begin(law, self.setup)
        return law


@functools.cache
def start_values() -> dict[str, Any]:
    """Float32 numbers with more bits than 16 bit hold."""
    generator = np.random.default_rng(7)
    return {name: stored(generator.normal(size=size) * 2, F32) for name, size in SIZES.items()}


def begin(law: Law, setup: Setup) -> None:
    """``initialize`` has just cast float32 weights that hold ``number.value``."""
    law.scaler, law.overflowed = setup.scaler(), set()
    law.steps = [(0, 0)] * len(law.groups)
    for name, number in law.numbers.items():
        number.has_master, number.stale, number.pending = False, None, None
        number.other = number.blurred = number.original = None
        if number.weight_type == F32:
            continue
        if setup.has_masters and law.owners(name):
            number.has_master = True
            continue
        # What the cast took away may come back with an undo.
        exact = number.value
        number.value, number.other, number.original = stored(exact, number.weight_type), exact, exact
        for optimizer, moment in number.moments.items():
            number.moments[optimizer] = stored(moment, number.weight_type)


def read(tensor: Any) -> Any:
    """A tensor's numbers, copied."""
    return tensor.detach().double().reshape(-1).numpy().copy()


SETUPS = [
    Setup(level, half, masters, scale, momentum, optimizers)
    for level, half, masters in (
        *(("O2", BF16, "split"), ("O2", F16, True), ("O2", BF16, True), ("O2", BF16, "split"), ("O2", F16, True)),
        *(("O1", F16, True), ("O3", F16, True), ("O2", BF16, False), ("O0", F32, True)),
        *(("O2", F16, "model"), ("O2", BF16, "model")),
    )
    for scale in ("dynamic", 8.0, 1.0)
    for momentum in (False, True)
    for optimizers in (1, 2)
    # Patching torch's functions takes longer than all the rest of a run.
    if level != "O1" or (momentum and scale != 1.0)
]


def masters_of(setup: Setup) -> str:
    """ "split", "model", "full" or "none"."""
    if setup.stays_float32:
        return "model"
    return "split" if setup.splits else ("full" if setup.has_masters else "none")
