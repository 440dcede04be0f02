"""Models with a fault planted in them, made by a generator with a fixed seed: what a report has to name."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from models import CASES, Case, Parts
from torch import Tensor, nn

SITES = {
    "cnn": ("features.0", "features.3", "head"),
    "lstm": ("embedding", "head"),
    "transformer": ("embedding", "layer.linear1", "layer", "head"),
    "unet": ("down.0", "middle.1", "up", "head"),
}
KINDS = ("overflow", "forced", "cast", "data", "float32")


class Plant(nn.Module):
    """Computes one of the functions below, of a size."""

    def __init__(self, function: Callable[[Tensor, float], Tensor], size: float = 1.0) -> None:
        super().__init__()
        self.function, self.size = function, size

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.size)


def normed(x: Tensor, size: float) -> Tensor:
    """A hand-written norm: its squares leave float16's range, its results do not."""
    y = x * size
    return y / (y.square().mean(-1, keepdim=True) + 1.0).sqrt()


def gated(x: Tensor, size: float) -> Tensor:
    """A softmax over the last dimension written without taking the largest off."""
    e = torch.exp(x.tanh() + size)
    return x * e / e.sum(-1, keepdim=True)


def summed(x: Tensor, size: float) -> Tensor:
    """A mean by hand, summed first."""
    total = (x.abs().clamp(max=4.0) * size).sum()
    return x * (total / total.detach())


def forced(x: Tensor, size: float) -> Tensor:
    """Computes a norm in float16 whatever the level."""
    energy = (x.half() * size).square().mean()
    return x / (1 + energy.to(x.dtype))


def cast_badly(x: Tensor, size: float) -> Tensor:
    """Casts to float16 what it does not hold."""
    wide = (x.float().abs() + 1) * size
    return x + (wide.half() - wide.half()).to(x.dtype)


def log_of_zero(x: Tensor, size: float) -> Tensor:
    """Takes a logarithm of 0 in float32 and multiplies it by 0."""
    nothing = (x - x).detach().float()
    return x + (torch.log(nothing) * nothing).to(x.dtype)


def gain() -> nn.Module:
    """A norm's weight at 1.0."""
    return Parts(lambda self, x: x * self.weight, weight=nn.Parameter(torch.ones(())))


@dataclass
class Planted:
    """A model with a fault.

    Attributes:
        where: what is to be named; for a frozen norm every weight at 1.0, joined by commas.
        batch: of which the fault shows.
    """

    number: int
    kind: str
    network: str
    site: str
    where: str
    model: nn.Module
    batch: tuple[Tensor, Tensor]

    @property
    def case(self) -> Case:
        return CASES[self.network]

    def step(self, model: Any) -> Tensor:
        """Compute the loss of the batch."""
        return self.case.loss(model(self.batch[0]), self.batch[1])

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} in {self.network} at {self.site}"


def planted(count: int, kinds: tuple[str, ...] = KINDS, seed: int = 13) -> Iterator[Planted]:
    """``count`` faults: every kind in every network, at sites and of sizes that the seed chooses."""
    rng = random.Random(seed)
    for number in range(count):
        kind, network = kinds[number % len(kinds)], list(CASES)[number // len(kinds) % len(CASES)]
        site = rng.choice(SITES[network])
        model, batch = CASES[network].build(seed=number), CASES[network].batches(1 + rng.randrange(4))[-1]
        if kind == "data":
            yield _bad_data(number, network, model, batch, rng)
            continue
        plant = _plant(kind, rng)
        _insert(model, site, plant)
        where = f"{site}.1"
        if kind == "frozen":
            where = ",".join(sorted(name for name, p in model.named_parameters() if bool((p == 1).all())))
        yield Planted(number, kind, network, site, where, model, batch)


def _plant(kind: str, rng: random.Random) -> nn.Module:
    makers: dict[str, Callable[[], nn.Module]] = {
        "overflow": lambda: rng.choice(
            [
                Plant(normed, 10 ** rng.uniform(3.3, 4)),
                Plant(gated, rng.uniform(11.2, 12)),
                Plant(summed, 10 ** rng.uniform(3.9, 4.1)),
            ]
        ),
        "forced": lambda: Plant(forced, 10 ** rng.uniform(3.5, 3.9)),
        "frozen": gain,
        "cast": lambda: Plant(cast_badly, 10 ** rng.uniform(5, 8)),
        "float32": lambda: Plant(log_of_zero),
    }
    return makers[kind]()


def _bad_data(number: int, network: str, model: nn.Module, batch: Any, rng: random.Random) -> Planted:
    """nan in the images; text cannot hold it, and there it is in a weight, as after a step with bad data."""
    x, y = batch[0].clone(), batch[1]
    if x.is_floating_point():
        x.view(-1)[rng.randrange(x.numel())] = rng.choice([float("nan"), float("inf")])
        return Planted(number, "data", network, "the batch", "", model, (x, y))
    name, parameter = rng.choice([(n, p) for n, p in model.named_parameters() if "embedding" not in n])
    with torch.no_grad():
        parameter.view(-1)[0] = float("nan")
    return Planted(number, "weights", network, name, name, model, (x, y))


def _insert(model: nn.Module, site: str, plant: nn.Module) -> None:
    parent, _, name = site.rpartition(".")
    holder = model.get_submodule(parent)
    setattr(holder, name, nn.Sequential(holder.get_submodule(name), plant))
