"""A run of the state machine of the law: the real thing and the law's picture, taken through the same actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from law_numbers import Law, Number
from law_world import Setup, World, begin, read
from random_world import DTYPES
from reference_loop import F32, stored

import mpinit

T = TypeVar("T")
SIDES = ("weight", "group")


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


Kind = Callable[["Run", Pick], None]


class Run:
    """A world and what the law says of it.

    Between actions a write, or a gradient edited by hand, may wait for the next look at it; :meth:`check` compares
    what the law says must be visible by then.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.world = World(setup)
        self.law: Law = self.world.law()
        self.saved: dict[str, torch.Tensor] | None = None
        # Weights whose entry in a group was put there since the optimizer last looked.
        self.fresh_entries: set[tuple[str, int]] = set()
        self.check()

    @property
    def model(self) -> Any:
        """The model."""
        return self.world.model

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers."""
        return self.world.optimizers

    def number(self, name: str) -> Number:
        """The law's picture of a weight."""
        return self.law.numbers[name]

    def entry(self, name: str, optimizer: int) -> torch.Tensor:
        """What stands for a weight in an optimizer's groups."""
        for index, names in enumerate(self.law.groups[optimizer]):
            if name in names:
                parameter: torch.Tensor = self.optimizers[optimizer].param_groups[index]["params"][names.index(name)]
                return parameter
        raise AssertionError(f"{name} is not in optimizer {optimizer}")

    def side(self, name: str, side: str) -> torch.Tensor:
        """A weight, or what stands for it in the first optimizer that has it."""
        owners = self.law.owners(name)
        return self.world.weight(name) if side == "weight" or not owners else self.entry(name, owners[0])

    def members(self) -> list[str]:
        """The weights that some optimizer steps and that are not frozen."""
        return [name for name, number in self.law.numbers.items() if self.law.owners(name) and not number.frozen]

    def is_fresh(self, name: str) -> bool:
        """Whether its entry in a group was put there by hand, and nobody has looked since."""
        return any(known == name for known, _ in self.fresh_entries)

    def joined(self, name: str, optimizer: int) -> None:
        """A weight has been put into an optimizer's groups, and nobody has looked since."""
        self.fresh_entries.add((name, optimizer))
        if self.setup.has_masters and self.number(name).weight_type != F32:
            self.number(name).has_master = True

    # -- looks --------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Everything that was done by hand is seen."""
        for index, optimizer in enumerate(self.optimizers):
            list(mpinit.master_params(optimizer))
            self.looked_at(index)
        for number in self.law.numbers.values():
            number.stale = None

    def looked_at(self, optimizer: int) -> None:
        """An optimizer has looked at its gradients."""
        for name in self.law.members(optimizer):
            self.number(name).pending = None
        self.fresh_entries = {(name, index) for name, index in self.fresh_entries if index != optimizer}

    def forward(self) -> dict[str, torch.Tensor]:
        """A forward shows every number: every write to a master is seen by then; returns what comes out."""
        names = list(self.law.numbers)
        outputs = dict(zip(names, self.model(torch.ones(1, 1), names), strict=True))
        kind = self.setup.half
        for name, number in self.law.numbers.items():
            number.stale = None if number.stale == "weight" else number.stale
            _same(outputs[name], stored(number.weight, kind), f"forward of {name}")
        return outputs

    def calm(self) -> None:
        """Clear everything where an overflow is left: by hand, gradients are only touched without one."""
        if self.law.overflowed:
            self.clear_all()

    def clear_all(self) -> None:
        """All gradients are cleared, on both sides."""
        self.model.zero_grad()
        for index, optimizer in enumerate(self.optimizers):
            optimizer.zero_grad()
            self.law.clear(index, to_none=True)
            self.looked_at(index)
        for number in self.law.numbers.values():
            number.gradient = number.pending = None

    def save(self) -> dict[str, Any]:
        """``model.state_dict()`` holds the numbers; returns them."""
        state = self.model.state_dict()
        numbers = {}
        for name, number in self.law.numbers.items():
            real = state[f"{name}.weight"]
            assert real.dtype is torch.float32, name
            numbers[name] = read(real)
            # The master of one that nobody saw join is made at the next look, of blocks that nobody wrote to.
            number.settle(numbers[name], for_good=not self.is_fresh(name))
        return numbers

    def step(self, optimizer: int) -> None:
        """One step."""
        self.optimizers[optimizer].step()
        done = self.law.step(optimizer)
        self.looked_at(optimizer)
        if done:
            self.settle()

    def settle(self) -> None:
        """Where the law left room, look what it came to: after a step, and before a master is written to."""
        if any(number.other is not None and number.has_master for number in self.law.numbers.values()):
            self.save()

    def thaw(self) -> None:
        """Train everything again, with no gradients about."""
        for name, number in self.law.numbers.items():
            if number.frozen:
                self.side(name, number.frozen).requires_grad_(True)
                number.frozen = None
        self.clear_all()

    def undo(self) -> None:
        """``mpinit.undo``, and a look at the float32 weights."""
        self.thaw()
        mpinit.undo(self.model)
        for name, number in self.law.numbers.items():
            weight = self.world.weight(name)
            assert weight.dtype is torch.float32, name
            assert number.allows(read(weight)), f"undone {name}: {read(weight)} instead of {number.value}"
            number.value, number.other, number.blurred, number.original = read(weight), None, None, None
            for owner in self.law.owners(name):
                assert self.entry(name, owner) is weight, f"undo left something else than {name} in the groups"
        self.fresh_entries.clear()

    def begin_again(self) -> None:
        """Undo, and initialise again."""
        self.undo()
        self.world.initialize()
        begin(self.law, self.setup)

    # -- comparing ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that must be visible now, without a look."""
        for name, number in self.law.numbers.items():
            weight = self.world.weight(name)
            assert weight.dtype is DTYPES[number.weight_type], name
            if number.stale != "weight":
                _same(weight, number.weight, f"weight of {name}")
            if number.pending is None and number.frozen != "group":
                _same(weight.grad, number.gradient, f"gradient of the weight of {name}")
            for owner in self.law.owners(name):
                self._check_entry(name, number, owner)
        assert mpinit.loss_scale(self.optimizers[0]) == self.law.scaler.scale
        for optimizer, steps in zip(self.optimizers, self.law.steps, strict=True):
            assert mpinit.step_counts(optimizer) == steps

    def _check_entry(self, name: str, number: Number, owner: int) -> None:
        entry = self.entry(name, owner)
        if (name, owner) in self.fresh_entries:
            return
        if number.has_master:
            assert entry is not self.world.weight(name), f"no master of {name} in optimizer {owner}"
            if not number.split and number.stale != "group" and number.other is None:
                _same(entry, number.value, f"master of {name}")
        if number.pending is None and not number.frozen:
            _same(entry.grad, number.gradient, f"gradient of {name} in the groups of optimizer {owner}")
        moment = self.optimizers[owner].state.get(entry, {}).get("momentum_buffer")
        _same(moment, number.moments.get(owner), f"momentum of {name} in optimizer {owner}")


def _same(real: torch.Tensor | None, expected: Any, what: str) -> None:
    if real is None or expected is None:
        assert real is None and expected is None, f"{what}: {real} instead of {expected}"
        return
    numbers = real.detach() if real.dtype is torch.float32 else real.detach().float()
    assert (numbers.reshape(-1).numpy() == expected).all(), f"{what}: {read(real)} instead of {expected}"
