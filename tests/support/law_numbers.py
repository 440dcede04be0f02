"""The law of two copies in plain numpy: one float32 number a weight, one gradient, whoever holds a copy of them.

Nothing of mpinit is used here. Where the law leaves room (an unchanged element of a split master in a block that was
written to, the low bits of a weight that has no master), a weight has a second number that is just as right,
:attr:`Number.other`, until the real one has been looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from reference_loop import F32, Scaler, finite, stored

Array = Any

# A write may cost the elements of a split master's block their low bits; no block is longer than this.
LONGEST_BLOCK = 128
RATE, MOMENTUM = 2.0**-4, 0.5


@dataclass
class Number:
    """One weight, as the law has it.

    Attributes:
        name: the module's name.
        value: the number, at every element; ``other`` is what it may be instead.
        blurred: what ``other`` may have become where a write has cost the low bits of what is near it.
        original: what a weight without a master was cast from: the same bits again are the same number again.
        weight_type: what the model computes with.
        split: the master is split.
        has_master: it is stepped in float32; otherwise in its own type.
        gradient: what the next step uses.
        moments: SGD's momentum, for each optimizer.
        frozen: the side whose ``requires_grad`` was switched off.
        stale: the side that need not have seen the last write yet.
        pending: the side whose gradient was changed since the last look.
    """

    name: str
    value: Array
    weight_type: str
    split: bool = False
    has_master: bool = False
    other: Array | None = None
    blurred: Array | None = None
    original: Array | None = None
    gradient: Array | None = None
    moments: dict[int, Array] = field(default_factory=dict)
    frozen: str | None = None
    stale: str | None = None
    pending: str | None = None
    _seen: tuple[Array, bool, Array] = (None, False, None)

    @property
    def stepped_type(self) -> str:
        """The type its optimizer steps."""
        return F32 if self.has_master else self.weight_type

    @property
    def weight(self) -> Array:
        """What the model holds."""
        if self._seen[0] is not self.value or self._seen[1] is not self.has_master:
            weight = stored(self.value, self.weight_type, half_away=self.split and self.has_master)
            weight.setflags(write=False)
            self._seen = self.value, self.has_master, weight
        weight: Array = self._seen[2]
        return weight

    def write(self, values: Array) -> None:
        """Somebody writes to the weight: what was not changed keeps its low bits."""
        before, new = self.weight, stored(values, self.weight_type)
        changed = before != new
        if self.split and self.has_master:
            self._blur(changed)
        if self.other is not None:
            self.other = np.where(changed, new, self.other)
        if self.blurred is not None:
            self.blurred = np.where(changed, new, self.blurred)
        self.value = np.where(changed, new, self.value)
        self.stale = "group" if self.has_master else None

    def _blur(self, changed: Array) -> None:
        places = np.flatnonzero(changed)
        near = np.zeros(changed.shape, dtype=bool)
        for place in places:
            near[max(place - LONGEST_BLOCK + 1, 0) : place + LONGEST_BLOCK] = True
        if places.size:
            other = self.value if self.other is None else self.other
            # Where there are two already, the second may lose its low bits, too.
            rounded = stored(other, self.weight_type, half_away=True)
            self.blurred = np.where(near & (other != self.value), rounded, other) if self.other is not None else None
            self.other = np.where(near & (other == self.value), self.weight, other)

    def write_master(self, values: Array) -> None:
        """Somebody writes to the master."""
        self.value, self.stale = stored(values, F32), "weight"
        self.other = self.blurred = None

    def set_gradient(self, values: Array | None, side: str) -> None:
        """The gradient is changed by hand on one side."""
        self.gradient, self.pending = values, side if self.has_master else None

    def step(self, optimizer: int, momentum: bool) -> None:
        """SGD."""
        if self.gradient is None or self.frozen:
            return
        kind, gradient = self.stepped_type, self.gradient
        if momentum:
            before = self.moments.get(optimizer)
            if before is not None:
                gradient = stored(stored(before * MOMENTUM, kind) + gradient, kind)
            self.moments[optimizer] = gradient
        moved = stored(self.value - RATE * gradient, kind)
        if self.other is not None:
            same = moved == self.value if not self.has_master else np.zeros(moved.shape, dtype=bool)
            self.other = np.where(same, self.other, moved if not self.has_master else self.other - RATE * gradient)
            self.other = stored(self.other, F32)
        if self.blurred is not None:
            self.blurred = stored(self.blurred - RATE * gradient, F32)
        self.value = moved

    def allows(self, real: Array) -> bool:
        """Whether ``real`` is the number."""
        right = real == self.value
        if self.other is not None:
            right = right | (real == self.other)
            if self.blurred is not None:
                right = right | (real == self.blurred)
        if self.original is not None and not self.has_master:
            right = right | ((real == self.original) & (stored(self.original, self.weight_type) == self.value))
        return bool(right.all())

    def settle(self, real: Array, for_good: bool = True) -> None:
        """The real number has been looked at: it is this one, from here on where it is ``for_good``."""
        assert self.allows(real), f"{self.name}: {real} instead of {self.value}"
        if self.has_master and for_good:
            self.value, self.other, self.blurred = real, None, None

    def load(self, values: Array) -> None:
        """Loaded from a checkpoint."""
        self.value = stored(values, self.stepped_type)
        self.other = self.original = None if self.has_master or self.weight_type == F32 else values
        self.blurred = None
        self.stale = None


@dataclass
class Law:
    """All numbers, who steps them, and what scaling does.

    Attributes:
        numbers: by name.
        groups: for each optimizer its groups, each a list of names.
        scaler: the loss's.
        momentum: whether SGD has momentum.
        overflowed: the optimizers whose gradients hold an overflow.
        steps: (done, skipped) for each optimizer.
    """

    numbers: dict[str, Number]
    groups: list[list[list[str]]]
    scaler: Scaler
    momentum: bool
    overflowed: set[int] = field(default_factory=set)
    steps: list[tuple[int, int]] = field(default_factory=list)

    def members(self, optimizer: int) -> list[str]:
        """The names in an optimizer's groups."""
        return [name for group in self.groups[optimizer] for name in group]

    def owners(self, name: str) -> list[int]:
        """The optimizers that step a weight."""
        return [index for index in range(len(self.groups)) if name in self.members(index)]

    def backward(self, gradients: dict[str, Array], optimizers: list[int]) -> None:
        """What leaving ``scale_loss`` does, given unscaled gradients."""
        for name, fresh in gradients.items():
            number = self.numbers[name]
            number.gradient = fresh if number.gradient is None else number.gradient + fresh
        if not self.scaler.dynamic:
            return
        found = False
        for optimizer in optimizers:
            mine = [gradients[name] for name in self.members(optimizer) if name in gradients]
            if not all(map(finite, mine)):
                self.overflowed.add(optimizer)
                found = True
        if any(name in gradients for optimizer in optimizers for name in self.members(optimizer)):
            self.scaler.note(found)
            self.scaler.update()

    def step(self, optimizer: int) -> bool:
        """One step; whether it was done."""
        good, skipped = self.steps[optimizer]
        for name in self.members(optimizer):
            self.numbers[name].stale = self.numbers[name].pending = None
        if optimizer in self.overflowed:
            self.steps[optimizer] = good, skipped + 1
            return False
        self.steps[optimizer] = good + 1, skipped
        for name in self.members(optimizer):
            self.numbers[name].step(optimizer, self.momentum)
        return True

    def clear(self, optimizer: int, to_none: bool) -> None:
        """``optimizer.zero_grad()``."""
        self.overflowed.discard(optimizer)
        for name in self.members(optimizer):
            self.clear_gradient(self.numbers[name], to_none)

    @staticmethod
    def clear_gradient(number: Number, to_none: bool) -> None:
        """One gradient is cleared."""
        number.pending = None
        if number.gradient is not None:
            number.gradient = None if to_none else np.zeros_like(number.gradient)
