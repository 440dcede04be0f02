"""What a training loop in mixed precision must do to its numbers, written down a second time in plain numpy.

Nothing of mpinit is used here. Numbers are float64 arrays; wherever the real thing keeps a number in fewer bits
(:func:`stored`), the reference rounds it to those bits, and nowhere else. Three rules are all there is to it:

* a step uses the sum of the unscaled gradients since they were last cleared, and is skipped if any of these was inf
  or nan, until they are cleared;
* a scale moves once for every check, or once for all those that were put off together;
* weights follow their masters, and masters follow whoever else writes to the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = Any
F32, F16, BF16 = "float32", "float16", "bfloat16"


def stored(values: Array, dtype: str, half_away: bool = False) -> Array:
    """``values`` with the bits that ``dtype`` keeps; 16-bit arithmetic passes through float32."""
    with np.errstate(all="ignore"):
        single = np.asarray(values, dtype=np.float64).astype(np.float32)
        if dtype == F16:
            single = single.astype(np.float16)
        elif dtype == BF16:
            bits = single.view(np.uint32).astype(np.uint64)
            bits += 0x8000 if half_away else 0x7FFF + ((bits >> 16) & 1)
            rounded = ((bits & 0xFFFF0000).astype(np.uint32)).view(np.float32)
            single = np.where(np.isnan(single), single, rounded)
    return single.astype(np.float64)


def finite(values: Array) -> bool:
    """Whether there is no inf and no nan."""
    return bool(np.isfinite(values).all())


@dataclass
class Scaler:
    """A loss scale: ``noted`` is what checks found that no update has taken into account yet."""

    dynamic: bool
    scale: float
    hysteresis: int
    interval: int
    low: float
    high: float
    unskipped: int = 0
    tolerance: int = field(init=False)
    noted: bool | None = None

    def __post_init__(self) -> None:
        self.tolerance = self.hysteresis

    def note(self, overflow: bool) -> None:
        """Take down the outcome of one check."""
        if self.dynamic:
            self.noted = overflow or bool(self.noted)

    def update(self) -> None:
        """Move by what was noted."""
        overflow, self.noted = self.noted, None
        if overflow is None:
            return
        if overflow:
            self.unskipped = 0
            self.tolerance = max(self.tolerance - 1, 0)
            if self.tolerance == 0:
                self.scale /= 2
        else:
            self.unskipped += 1
            if self.unskipped == self.interval:
                self.scale *= 2
                self.unskipped, self.tolerance = 0, self.hysteresis
        self.scale = min(max(self.scale, self.low), self.high)


@dataclass
class Leaf:
    """One weight vector, with all that belongs to it.

    Attributes:
        weight, weight_type: what the model computes with.
        master, master_type: what the optimizer steps; the weight itself where they are of one type.
        gradient, gradient_type: what the next step uses, or None.
        compute: the type its gradient is computed in.
        split: the master is the weight and a remainder: an external write replaces all of it.
        written: somebody wrote to the weight since the master was last compared with it.
        handed_out: somebody got hold of ``.data`` before writing, so that it is known which elements changed.
        optimizer: the number of the optimizer it belongs to, or None while it belongs to none.
    """

    weight: Array
    weight_type: str
    master: Array
    master_type: str
    gradient_type: str
    compute: str
    split: bool = False
    gradient: Array | None = None
    state: dict[str, Array] = field(default_factory=dict)
    frozen: bool = False
    written: bool = False
    handed_out: bool = False
    optimizer: int | None = None
    rate: float = 0.0

    def follow(self) -> None:
        """The weight becomes its rounded master."""
        self.weight = stored(self.master, self.weight_type, half_away=self.split)
        self.written = self.handed_out = False

    def adopt(self) -> None:
        """The master takes what somebody else wrote."""
        if self.written and self.split:
            # One block: where any of it was changed, all of it is its own master.
            if (stored(self.master, self.weight_type, half_away=True) != self.weight).any():
                self.master = self.weight.copy()
        elif self.written:
            same = stored(self.master, self.weight_type, half_away=self.split) == self.weight
            self.master = np.where(same, self.master, self.weight)
        self.written = self.handed_out = False

    def hand_out(self) -> None:
        """Somebody gets hold of ``.data``."""
        self.handed_out |= not self.written

    def write(self, values: Array) -> None:
        """Somebody else writes to the weight."""
        self.weight, self.written = stored(values, self.weight_type), True
        if self.weight_type == self.master_type:
            self.adopt()


@dataclass
class Optimizer:
    """SGD with momentum or Adam over some leaves, and whether its gradients hold an overflow."""

    leaves: list[Leaf]
    momentum: float
    adam: bool = False
    overflowed: bool = False
    good: int = 0
    skipped: int = 0
    in_a_row: int = 0
    waiting: list[Scaler] = field(default_factory=list)

    def cleared(self, zeros_count: bool) -> None:
        """Gradients that are all gone, or (noticed on entering ``scale_loss``) all 0, take an overflow with them."""
        left = [leaf.gradient for leaf in self.leaves if leaf.gradient is not None]
        if not left or (zeros_count and not any(gradient.any() for gradient in left)):
            self.overflowed = False

    def step(self) -> bool:
        """One step; whether it was done."""
        for scaler in self.waiting:
            scaler.update()
        self.waiting.clear()
        for leaf in self.leaves:
            leaf.adopt()
        if self.overflowed:
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            return False
        self.good, self.in_a_row = self.good + 1, 0
        for leaf in self.leaves:
            if leaf.gradient is not None:
                with np.errstate(all="ignore"):
                    self._adam(leaf, leaf.gradient) if self.adam else self._sgd(leaf, leaf.gradient)
            leaf.follow()
        return True

    def _sgd(self, leaf: Leaf, gradient: Array) -> None:
        kind = leaf.master_type
        if self.momentum:
            before = leaf.state.get("momentum_buffer")
            if before is not None:
                gradient = stored(stored(before * self.momentum, kind) + gradient, kind)
            leaf.state["momentum_buffer"] = gradient
        leaf.master = stored(leaf.master - leaf.rate * gradient, kind)

    def _adam(self, leaf: Leaf, gradient: Array) -> None:
        state = leaf.state
        steps = state.get("step", np.zeros(())) + 1
        first = 0.5 * state.get("exp_avg", np.zeros(gradient.shape)) + 0.5 * gradient
        second = 0.75 * state.get("exp_avg_sq", np.zeros(gradient.shape)) + 0.25 * gradient**2
        size = np.sqrt(second / (1 - 0.75**steps)) + 1e-8
        leaf.master = leaf.master - leaf.rate * (first / (1 - 0.5**steps)) / size
        state.update(step=steps, exp_avg=first, exp_avg_sq=second)


class Loop:
    """Leaves, optimizers and scalers, and what each action of a training loop does to them."""

    def __init__(self, leaves: dict[str, Leaf], optimizers: list[Optimizer], scalers: list[Scaler]) -> None:
        self.leaves = leaves
        self.optimizers = optimizers
        self.scalers = scalers
        self.remembered: dict[str, Array] = {}

    def gradient_of(self, leaf: Leaf, target: Array, weight: float, scale: float, poison: float | None) -> Array:
        """The scaled gradient of ``weight / 2 * ||leaf - target||^2``, as the backward pass leaves it."""
        with np.errstate(all="ignore"):
            distance = stored(stored(leaf.weight, leaf.compute) - target, F32)
            gradient = stored(stored(distance * weight * scale, F32), leaf.compute)
            if poison is not None:
                gradient = gradient.copy()
                gradient[0] += poison
        return gradient

    def backward(
        self, loss: int, taking_part: Iterable[int], gradients: dict[str, Array], delay: bool, identity: bool
    ) -> None:
        """What leaving ``scale_loss`` does with scaled gradients."""
        scaler, inverse = self.scalers[loss], 1 / self.scalers[loss].scale
        numbers = list(taking_part)
        for name, scaled in gradients.items():
            self._add(self.leaves[name], scaled if identity else scaled * inverse)
        for number in numbers:
            mine = [g for name, g in gradients.items() if self.leaves[name].optimizer == number]
            if mine and scaler.dynamic:
                overflow = not all(finite(gradient) for gradient in mine)
                scaler.note(overflow)
                self.optimizers[number].overflowed |= overflow
        if not delay:
            scaler.update()
        elif scaler.noted is not None:
            for number in numbers:
                self.optimizers[number].waiting.append(scaler)

    def _add(self, leaf: Leaf, fresh: Array) -> None:
        fresh = stored(fresh, leaf.gradient_type)
        with np.errstate(all="ignore"):
            total = fresh if leaf.gradient is None else stored(leaf.gradient + fresh, leaf.gradient_type)
        leaf.gradient = total

    def clear(self, leaves: Iterable[Leaf], to_none: bool) -> None:
        """``zero_grad`` of an optimizer or a model."""
        for leaf in leaves:
            if leaf.gradient is not None:
                leaf.gradient = None if to_none else np.zeros_like(leaf.gradient)
        for optimizer in self.optimizers:
            optimizer.cleared(zeros_count=False)

    def checkpoint(self) -> dict[str, Array]:
        """``model.state_dict()``: the masters' bits."""
        for leaf in self.leaves.values():
            leaf.adopt()
        return {name: leaf.master.copy() for name, leaf in self.leaves.items()}

    def load(self, values: dict[str, Array]) -> None:
        """``model.load_state_dict()``."""
        for name, leaf in self.leaves.items():
            leaf.master = stored(values[name], leaf.master_type)
            leaf.follow()

    def start_afresh(self) -> None:
        """A new process: what a checkpoint does not hold is gone."""
        self.checkpoint()
        for leaf in self.leaves.values():
            leaf.follow()
            leaf.gradient = None
        for scaler in self.scalers:
            scaler.noted = None
        for optimizer in self.optimizers:
            optimizer.overflowed = False
            optimizer.good = optimizer.skipped = optimizer.in_a_row = 0
            optimizer.waiting.clear()
