"""A model under mpinit and the same loop in float32 by hand, taken through the same actions.

The reference is plain torch: float32 parameters, their gradients and torch's own SGD over the same groups. What a
16-bit weight adds is the law alone: what was written to it counts where it is not the rounding of its number.
Gradients are numbers that every type holds, so that nothing needs a tolerance but a norm.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from loops import poison
from session_device import device, placed
from torch import nn
from torch.optim import SGD

import mpinit
from mpinit import registry

T = TypeVar("T")
SIZES = {"a": 3, "long": 4200, "b": 3, "kept": 3, "late": 3}
SCALE, MOMENTUM, RATE, LOSSES = 64.0, 0.5, 2.0**-4, 2
VALUES = (0.5, -1.0, 2.0)


class Interrupted(Exception):
    """Raised in the middle of the user's code."""


@dataclass(frozen=True)
class Setup:
    """How a run is set up; ``masters`` is ``master_weights``, or "O1" for that level, where functions cast."""

    half: torch.dtype
    masters: Any
    loss_scale: Any
    momentum: bool
    optimizers: int

    @property
    def keywords(self) -> dict[str, Any]:
        """What ``initialize`` is told."""
        dynamic = mpinit.DynamicLossScale(
            init=SCALE, max=SCALE * 4, min=0.5, growth_interval=2, max_consecutive_skips=10**6
        )
        o2 = {"opt_level": "O2", "cast_model_type": self.half, "master_weights": self.masters, "keep_fp32": ["kept"]}
        return {
            **({"opt_level": "O1", "patch_torch_functions_type": self.half} if self.masters == "O1" else o2),
            **{"loss_scale": dynamic if self.loss_scale == "dynamic" else self.loss_scale, "num_losses": LOSSES},
        }


SETUPS = [
    Setup(half, masters, scale, momentum, optimizers)
    for half, masters in (
        *((torch.float16, True), (torch.bfloat16, True), (torch.bfloat16, "split")),
        *((torch.float16, "model"), (torch.bfloat16, "model"), (torch.float16, "O1"), (torch.bfloat16, "O1")),
    )
    for scale in ("dynamic", 8.0, 1.0)
    for momentum in (False, True)
    for optimizers in (1, 2)
]


class Pick:
    """Choices, all out of one number that hypothesis draws; 0 takes the first every time."""

    def __init__(self, seed: int) -> None:
        self._left = seed

    def of(self, options: Sequence[T]) -> T:
        """One of the options."""
        self._left, index = divmod(self._left, len(options))
        return options[index]

    def some(self, options: Sequence[T]) -> list[T]:
        """One of them at least."""
        chosen = [option for option in options if self.of((True, False))]
        return chosen or [self.of(options)]


class Vector(nn.Module):
    """A weight vector that comes out as it is."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values.view(-1, 1))

    def forward(self, one: torch.Tensor) -> torch.Tensor:
        """``weight * 1``."""
        return nn.functional.linear(one, self.weight).view(-1)


class Vectors(nn.Module):
    """All of them; ``again`` shares its weight with ``a``."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, size in SIZES.items():
            self.add_module(name, Vector(torch.randn(size, generator=generator) * 2))
        self.again = Vector(torch.zeros(3))
        self.again.weight = self.get_submodule("a").weight

    def forward(self, one: torch.Tensor) -> dict[str, torch.Tensor]:
        """All vectors, by name."""
        return {name: module(one) for name, module in self.named_children()}


class Scaler:
    """A loss scale by hand."""

    def __init__(self, loss_scale: Any) -> None:
        self.dynamic = loss_scale == "dynamic"
        self.scale = SCALE if self.dynamic else loss_scale
        self.good = 0

    def update(self, overflow: bool) -> None:
        """After one check."""
        if not self.dynamic:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow or self.good == 2:
            self.scale *= 0.5 if overflow else 2.0
            self.good = 0
        self.scale = min(max(self.scale, 0.5), SCALE * 4)


def remainder(number: torch.Tensor) -> torch.Tensor:
    """What a split master has beyond its weight."""
    bits = number.view(torch.int32)
    return bits - (((bits + 0x8000) >> 16) << 16)


def rounded(number: torch.Tensor, dtype: torch.dtype, splits: bool) -> torch.Tensor:
    """What the weight of a number is."""
    if not splits:
        return number.to(dtype)
    return (((number.view(torch.int32) + 0x8000) >> 16) << 16).view(torch.float32).to(dtype)


class Run:
    """The real loop and the one by hand.

    Attributes:
        by_hand: a float32 parameter for each weight.
        mastered: names of the weights that have a master.
        overflowed: optimizers whose gradients hold an overflow; -1 for weights that have none.
        used: those that were stepped since a loss was last scaled.
        counts: (done, skipped) for each optimizer.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = placed(Vectors())
        homes = [["a", "long"], ["b", "kept"]] if setup.optimizers == 2 else [["a", "long", "b", "kept"]]
        more = {"lr": RATE, "momentum": MOMENTUM if setup.momentum else 0.0}
        self.by_hand = {name: nn.Parameter(self.weight(name).detach().clone()) for name in SIZES}
        self.optimizers: list[Any] = [SGD(map(self.weight, names), **more) for names in homes]
        self.references: list[Any] = [SGD([self.by_hand[name] for name in names], **more) for names in homes]
        self.groups = [[list(names)] for names in homes]
        self.saved: Any = None
        self.initialize()

    def initialize(self) -> None:
        """``mpinit.initialize``, also again after an undo."""
        mpinit.initialize(self.model, self.optimizers, **self.setup.keywords)
        self.mastered = {name for name in self.stepped() if self.casts(name)}
        # Of split masters, as of the last step: a write leaves them as they are.
        self.remainders: dict[str, torch.Tensor] = {}
        # The names of weights with a write that torch has counted since the last step.
        self.counted: set[str] = set()
        # The names of weights whose ``data`` was used: from then on any 0 in them counts as written.
        self.touched: set[str] = set()
        # The names of weights that were written to in a way that torch does not count.
        self.uncounted: set[str] = set()
        # Of full masters: what a weight was before it was written to, and what it has become.
        self.firsts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.scalers = [Scaler(self.setup.loss_scale) for _ in range(LOSSES)]
        self.overflowed: set[int] = set()
        self.used: set[int] = set()
        self.counts = [(0, 0) for _ in self.optimizers]

    # -- what there is ------------------------------------------------------------------------------------------

    def weight(self, name: str) -> Any:
        """The model's parameter."""
        return self.model.get_submodule(name).weight

    def casts(self, name: str) -> bool:
        """Whether a weight is 16-bit."""
        return name != "kept" and self.setup.masters not in ("model", "O1")

    def splits(self, name: str) -> bool:
        """Whether it is split."""
        return self.setup.masters == "split" and name in self.mastered

    def members(self, index: int) -> list[str]:
        """The names in an optimizer's groups."""
        return [name for names in self.groups[index] for name in names]

    def owners(self, name: str) -> list[int]:
        """The optimizers that step a weight."""
        return [index for index in range(len(self.groups)) if name in self.members(index)]

    def stepped(self) -> list[str]:
        """The names in any optimizer's groups."""
        return [name for name in SIZES if self.owners(name)]

    def trained(self) -> list[str]:
        """Those of them that are not frozen."""
        return [name for name in self.stepped() if self.by_hand[name].requires_grad]

    def loss(self, gradients: dict[str, torch.Tensor], bad: str | None = None) -> torch.Tensor:
        """A loss that gives these gradients, and an infinite one."""
        outputs = self.model(torch.ones(1, 1, device=device()))
        loss: Any = torch.zeros((), device=device())
        for name, gradient in gradients.items():
            if name == "a":
                loss = loss + (outputs["again"].float() * gradient.view(-1) / 2).sum()
                gradient = gradient / 2
            loss = loss + (outputs[name].float() * gradient.view(-1)).sum()
        return loss if bad is None else poison(loss, self.weight(bad))

    def pattern(self, name: str, factor: float) -> torch.Tensor:
        """Numbers that every type holds, and a few sums of them."""
        return factor * (1 + torch.arange(SIZES[name], device=device()) % 3).float().view(-1, 1)

    def gradients(self, pick: Pick, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Gradients for some; all are cleared before they would become numbers that not every type holds."""
        fresh = {name: self.pattern(name, pick.of(VALUES)) for name in pick.some(names)}
        for name, gradient in fresh.items():
            before = self.by_hand[name].grad
            if before is not None and not exact(torch.where(before.isfinite(), before, 0.0) + gradient):
                self.clear_all()
        return fresh

    def add(self, gradients: dict[str, torch.Tensor], bad: str | None = None) -> None:
        """By hand."""
        for name, fresh in gradients.items():
            fresh = fresh.clone()
            if name == bad:
                fresh.fill_(torch.inf)
            before = self.by_hand[name].grad
            self.by_hand[name].grad = fresh if before is None else before + fresh

    def infinite(self, names: Iterable[str]) -> bool:
        """Whether any of the gradients by hand is."""
        grads = [self.by_hand[name].grad for name in names]
        return any(grad is not None and not bool(grad.isfinite().all()) for grad in grads)

    def held_by(self, index: int) -> list[str]:
        """The members of an optimizer; of -1, the weights that have none."""
        return self.members(index) if index >= 0 else [name for name in SIZES if not self.owners(name)]

    def look(self) -> None:
        """Gradients that are gone take an overflow with them."""
        for index in list(self.overflowed):
            left = [grad for name in self.held_by(index) if (grad := self.by_hand[name].grad) is not None]
            others = index in self.used and not self.infinite(self.held_by(index))
            if others or not any(bool((grad != 0).any()) for grad in left):
                self.overflowed.discard(index)

    def begins(self, named: Sequence[int]) -> None:
        """A loss of some optimizers is about to be scaled, whose fault is what they overflow from here on.

        It is for those whose step was not skipped, if there are some.
        """
        skipped = self.used & self.overflowed
        new = [
            i for i in named if not (i in skipped and any(self.by_hand[n].grad is not None for n in self.members(i)))
        ]
        self.overflowed -= self.used.intersection(new or named)
        self.look()
        self.used.clear()

    def checked(self, loss_id: int | None) -> None:
        """Gradients were unscaled and checked, all there are; ``loss_id`` is None where an exception came."""
        if not self.scalers[0].dynamic:
            return
        found = {index for index in range(-1, len(self.groups)) if self.infinite(self.held_by(index))}
        if loss_id is not None and any(number.grad is not None for number in self.by_hand.values()):
            # What overflowed before is none of this loss's fault.
            self.scalers[loss_id].update(bool(found - self.overflowed))
        self.overflowed |= found

    def clear_all(self) -> None:
        """All gradients are cleared."""
        self.model.zero_grad()
        for parameter in self.by_hand.values():
            parameter.grad = None
        self.look()

    def calm(self) -> None:
        """By hand, gradients are only touched without an overflow."""
        if self.overflowed or self.infinite(SIZES):
            found, _ = set(self.overflowed), self.clear_all()
            for index in found - {-1}:
                # Until a step has looked, gradients may be the ones that overflowed, edited.
                self.optimizers[index].step()
                self.step_by_hand(index)

    @torch.no_grad()
    def written(self, name: str, counted: bool = True) -> None:
        """Record that a weight was written to, in a way that torch counts or not.

        If torch has counted no write to a split weight since the last step, and its ``data`` was never used, a 0 in it
        keeps positive low bits.
        """
        if counted:
            self.counted.add(name)
        is_exact = name in self.counted or name in self.touched
        held, number = self.weight(name).detach(), self.by_hand[name]
        if self.splits(name):
            low = self.remainders.setdefault(name, remainder(number.detach()))
            low = torch.where((held == 0) | held.isinf(), 0 if is_exact else low.clamp(min=0), low)
            number.copy_((held.float().view(torch.int32) + low).view(torch.float32))
        elif name in self.mastered:
            first, after = self.firsts.get(name, (number, number))
            first = first if after.equal(number) else number
            now, back = (torch.where(each.to(held.dtype) == held, each, held.float()) for each in (number, first))
            if not now.equal(back):  # written back to what it was: the low bits are gone if it was looked at in between
                now = torch.where(self.model.state_dict()[f"{name}.weight"] == back, back, now)
            self.firsts[name] = first.clone(), now.clone()
            number.copy_(now)
        else:
            number.copy_(held)

    def step_by_hand(self, index: int) -> None:
        """SGD, or nothing where gradients overflowed."""
        self.look()
        self.used.add(index)
        done, skipped = self.counts[index]
        if index in self.overflowed:
            self.counts[index] = done, skipped + 1
            return
        self.counts[index] = done + 1, skipped
        if any(self.by_hand[name].grad is not None for name in self.members(index) if name in self.mastered):
            self.remainders = {n: low for n, low in self.remainders.items() if n not in self.members(index)}
            self.counted.difference_update(self.members(index))
        self.references[index].step()

    def join(self) -> None:
        """Make masters for the weights that were added to groups, as the next backward pass or step does first."""
        for optimizer in self.optimizers:
            registry.session_meant(optimizer).managed.find(optimizer).members.sync_groups()
        self.mastered |= {name for name in self.trained() if self.casts(name)}

    # -- comparing ----------------------------------------------------------------------------------------------

    def check(self, numbers: bool = False) -> None:
        """Everything that is visible without a look; ``numbers``: and those of a checkpoint."""
        for name, number in self.by_hand.items():
            weight = self.weight(name)
            dtype = self.setup.half if self.casts(name) else torch.float32
            assert weight.dtype is dtype, name
            same(weight, rounded(number.detach(), dtype, self.splits(name)), f"weight of {name}")
            same(weight.grad, number.grad, f"gradient of {name}")
            assert weight.requires_grad == number.requires_grad, name
        assert self.weight("again") is self.weight("a")
        for index, (real, by_hand) in enumerate(zip(self.optimizers, self.references, strict=True)):
            assert len(real.param_groups) == len(self.groups[index])
            for group, names in zip(real.param_groups, self.groups[index], strict=True):
                assert list(map(id, group["params"])) == [id(self.weight(name)) for name in names]
            for name in self.members(index):
                mine = real.state.get(self.weight(name), {}).get("momentum_buffer")
                assert mine is None or mine.dtype is torch.float32
                same(mine, by_hand.state.get(self.by_hand[name], {}).get("momentum_buffer"), f"momentum of {name}")
            assert mpinit.step_counts(real) == self.counts[index]
        for loss_id, scaler in enumerate(self.scalers):
            assert mpinit.loss_scale(self.optimizers[0], loss_id) == scaler.scale
        if numbers:
            for name, value in self.model.state_dict().items():
                same(value, self.by_hand["a" if name.startswith("again") else name.split(".")[0]], f"number of {name}")
                assert value.dtype is torch.float32

    def undo(self) -> None:
        """``mpinit.undo``: float32 weights, to the bit."""
        for parameter in (*self.by_hand.values(), *map(self.weight, SIZES)):
            parameter.requires_grad_(True)
        self.calm()
        mpinit.undo(self.model)
        for name, number in self.by_hand.items():
            assert self.weight(name).dtype is torch.float32
            same(self.weight(name), number, f"undone {name}")
            same(self.weight(name).grad, number.grad, f"gradient of undone {name}")

    def copied(self) -> None:
        """A deep copy is the float32 loop, and goes on where the original is."""
        model, optimizers = copy.deepcopy((self.model, self.optimizers))
        self.undo()
        self.model, self.optimizers = model, optimizers
        for name, number in self.by_hand.items():
            same(self.weight(name), number, f"copied {name}")
            self.weight(name).requires_grad_(True)
            number.grad = None
        self.model.zero_grad()


def exact(values: torch.Tensor) -> bool:
    """Whether every type holds these, and what a norm is clipped to."""
    return bool((values.bfloat16().float() == values).all() and values.abs().max() <= 32)


def same(real: Any, expected: Any, what: str) -> None:
    """Assert that two tensors hold the same numbers, or that there is neither."""
    if real is None or expected is None:
        assert real is None and expected is None, f"{what}: {real} instead of {expected}"
        return
    if not torch.equal(real.detach().float(), expected.detach().float()):
        places = (real.float() != expected.float()).nonzero()[:3].tolist()
        raise AssertionError(f"{what} at {places}: {real.flatten()[:4]} instead of {expected.flatten()[:4]}")


Kind = Callable[[Run, Pick], Any]
