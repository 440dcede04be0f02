"""The real thing for the random loops: a tiny model under mpinit, and the reference's picture of the same start.

The gradient of every leaf is ``weight / 2 * ||leaf - target||^2``'s, with whole targets and powers of two as weights,
so that 16 bit hold it exactly and the reference needs no tolerance but where it says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from reference_loop import BF16, F16, F32, Leaf, Loop, Optimizer, Scaler, stored
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR

import mpinit

NAMES = ("a", "b", "c", "kept", "late", "late_kept")
LATE = NAMES[4:]
SIZE = 3
RATE = 2.0**-4
MAX_SKIPS = 4
DTYPES = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}


@dataclass(frozen=True)
class Config:
    """How one loop is set up; ``masters`` is True, False or "split" and counts at O2, ``rule`` is SGD's or "adam"."""

    level: str
    half: str
    masters: Any
    loss_scale: Any
    rule: str
    kernel: str
    losses: int
    optimizers: int
    first_scale: float
    hysteresis: int
    frozen: bool

    @property
    def has_masters(self) -> bool:
        """Whether there are masters at all."""
        return self.level == "O2" and bool(self.masters)

    @property
    def splits(self) -> bool:
        """Whether they are split."""
        return self.level == "O2" and self.masters == "split"

    @property
    def keywords(self) -> dict[str, Any]:
        """What ``initialize`` is told."""
        given: dict[str, Any] = {"opt_level": self.level, "loss_scale": self.loss_scale, "num_losses": self.losses}
        given |= {"verbosity": 0, "max_consecutive_skips": MAX_SKIPS}
        if self.loss_scale == "dynamic":
            given |= {"init_loss_scale": self.first_scale, "max_loss_scale": self.first_scale * 4}
            given |= {"min_loss_scale": 0.5, "growth_interval": 2, "hysteresis": self.hysteresis}
        if self.level == "O1":
            given["patch_torch_functions_type"] = DTYPES[self.half]
        elif self.level != "O0":
            given |= {"cast_model_type": DTYPES[self.half], "keep_fp32": ["kept", "late_kept"]}
        if self.level == "O2":
            given["master_weights"] = self.masters
        return given


class Vector(nn.Module):
    """A weight vector that comes out as it is, by way of a function that O1 casts."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values, dtype=torch.float32).view(SIZE, 1))

    def forward(self, one: torch.Tensor) -> torch.Tensor:
        """``weight * 1``."""
        return nn.functional.linear(one, self.weight).view(SIZE)


class Vectors(nn.Module):
    """All of them."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        for name, numbers in values.items():
            self.add_module(name, Vector(numbers))

    def forward(self, one: torch.Tensor, names: list[str]) -> list[torch.Tensor]:
        """The vectors asked for."""
        return [self.get_submodule(name)(one) for name in names]


class Poison(torch.autograd.Function):
    """0 going forward; coming back, ``bad`` for the first element and 0 for the others."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bad: float) -> torch.Tensor:
        ctx.like, ctx.bad = (weight.shape, weight.dtype), bad
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        shape, dtype = ctx.like
        gradient = torch.zeros(shape, dtype=dtype)
        gradient[0] = ctx.bad
        return gradient, None


def start_values() -> dict[str, Any]:
    """Float32 numbers with more bits than 16 bit hold."""
    generator = np.random.default_rng(7)
    return {name: stored(generator.normal(size=SIZE) * 2, F32) for name in NAMES}


def home_of(config: Config, name: str) -> int:
    """Which optimizer a leaf belongs to from the start."""
    return config.optimizers - 1 if name in ("c", "kept") else 0


class World:
    """Model, optimizers and schedulers, built the way a script builds them.

    Args:
        config: how.
        frozen: leaves that do not train yet when ``initialize`` is called.
        added: (leaf, optimizer) of the groups added since the start, in order.
        checkpoint: loaded before ``initialize``, as plain torch state, where given.
    """

    def __init__(
        self,
        config: Config,
        frozen: tuple[str, ...] = (),
        added: tuple[tuple[str, int], ...] = (),
        checkpoint: dict[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.model = Vectors(start_values())
        for name in frozen:
            self.weight(name).requires_grad_(False)
        self.places: dict[str, tuple[int, int, int]] = {}
        self.added = list(added)
        self.optimizers = [self._make(number) for number in range(config.optimizers)]
        for name, number in added:
            self._add(name, number)
        self.schedulers = [ExponentialLR(optimizer, gamma=0.5) for optimizer in self.optimizers]
        if checkpoint is not None:
            self._load(checkpoint)
        mpinit.initialize(self.model, self.optimizers, **config.keywords)
        if checkpoint is not None:
            mpinit.load_state_dict(checkpoint["mpinit"], self.optimizers[0])

    def weight(self, name: str) -> nn.Parameter:
        """The model's parameter."""
        parameter = self.model.get_submodule(name).weight
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def stepped(self, name: str) -> torch.Tensor:
        """What stands for a leaf in its optimizer's groups."""
        optimizer, group, index = self.places[name]
        parameter: torch.Tensor = self.optimizers[optimizer].param_groups[group]["params"][index]
        return parameter

    def _make(self, number: int) -> Any:
        groups: list[dict[str, Any]] = []
        for names in (("a", "b"), ("c", "kept")):
            mine = [name for name in names if home_of(self.config, name) == number]
            if mine:
                self.places |= {name: (number, len(groups), index) for index, name in enumerate(mine)}
                groups.append({"params": [self.weight(name) for name in mine]})
        more: dict[str, Any] = {"plain": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}[self.config.kernel]
        if self.config.rule == "adam":
            return Adam(groups, lr=RATE, betas=(0.5, 0.75), **more)
        return SGD(groups, lr=RATE, momentum=0.5 if self.config.rule == "momentum" else 0.0, **more)

    def _add(self, name: str, number: int) -> None:
        optimizer = self.optimizers[number]
        self.places[name] = (number, len(optimizer.param_groups), 0)
        optimizer.add_param_group({"params": [self.weight(name)], "lr": RATE})

    def add(self, name: str, number: int, gradient: Any) -> None:
        """``add_param_group`` with a leaf that may have a gradient already."""
        weight = self.weight(name)
        if gradient is not None:
            weight.grad = torch.tensor(gradient, dtype=weight.dtype).view_as(weight)
        self.added.append((name, number))
        self._add(name, number)

    def checkpoint(self) -> dict[str, Any]:
        """Everything a script saves, through the serialisation it uses."""
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "mpinit": mpinit.state_dict(self.optimizers[0]),
        }

    def _load(self, checkpoint: dict[str, Any]) -> None:
        self.model.load_state_dict(checkpoint["model"])
        for ours, theirs in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            ours.load_state_dict(theirs)
        for ours_, theirs in zip(self.schedulers, checkpoint["schedulers"], strict=True):
            ours_.load_state_dict(theirs)

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Load after ``initialize``."""
        self._load(checkpoint)
        mpinit.load_state_dict(checkpoint["mpinit"], self.optimizers[0])


def picture(config: Config, frozen: tuple[str, ...]) -> Loop:
    """The reference's idea of a fresh :class:`World`."""
    values = start_values()
    leaves = {name: _leaf(config, name, values[name], name in frozen) for name in NAMES}
    for name in NAMES[:4]:
        leaves[name].optimizer, leaves[name].rate = home_of(config, name), RATE
    momentum = 0.5 if config.rule == "momentum" else 0.0
    optimizers = [
        Optimizer([leaf for leaf in leaves.values() if leaf.optimizer == number], momentum, config.rule == "adam")
        for number in range(config.optimizers)
    ]
    return Loop(leaves, optimizers, [_scaler(config) for _ in range(config.losses)])


def _leaf(config: Config, name: str, values: Any, frozen: bool) -> Leaf:
    cast = config.level in ("O2", "O3") and "kept" not in name
    weight_type = config.half if cast else F32
    master_type = F32 if config.has_masters or not cast else config.half
    leaf = Leaf(
        weight=values,
        weight_type=weight_type,
        master=values,
        master_type=master_type,
        gradient_type=BF16 if config.splits and cast else master_type,
        compute=F32 if config.level == "O0" else config.half,
        split=config.splits and cast,
        frozen=frozen,
    )
    if name in LATE or frozen or weight_type == master_type:
        # Nobody asked for a master while the model was cast.
        leaf.master = stored(values, weight_type)
    leaf.follow()
    return leaf


def _scaler(config: Config) -> Scaler:
    dynamic = config.loss_scale == "dynamic"
    first = config.first_scale if dynamic else config.loss_scale
    return Scaler(dynamic, first, config.hysteresis if dynamic else 1, 2, 0.5, first * 4)
