"""The real thing and the reference taken through the same actions, and compared after each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from random_actions import DELAYS, Add, Backward, Clear, Clip, Freeze, Reload, Remember, Restart, Schedule, Step, Write
from random_world import DTYPES, MAX_SKIPS, NAMES, RATE, SIZE, Config, Poison, World, picture
from reference_loop import F32, Leaf

import mpinit

# What Adam and norms may differ by from float64: a few roundings of float32, or of 16 bit where gradients are that.
FLOAT32_TOLERANCE, HALF_TOLERANCE = 2.0**-18, 2.0**-5


class Stopped(Exception):
    """Thrown inside ``scale_loss``."""


class Run:
    """A world and its reference, taken through the same actions."""

    def __init__(self, config: Config) -> None:
        self.config = config
        frozen = ("b",) if config.frozen else ()
        self.real, self.expected = World(config, frozen), picture(config, frozen)
        self.remembered: tuple[dict[str, Any], dict[str, torch.Tensor]] | None = None
        self.check()

    def act(self, action: Any) -> None:
        """One action on both, and the comparison."""
        getattr(self, type(action).__name__.lower())(action)
        self.check()

    def _number(self, which: int) -> int:
        return which % self.config.optimizers

    # -- gradients ----------------------------------------------------------------------------------------------

    def backward(self, action: Backward) -> None:
        """The pass itself, and what the reference says it leaves."""
        numbers = [n for n in range(self.config.optimizers) if action.optimizers >> n & 1] or [0]
        leaves = self.expected.leaves
        names = [n for i, n in enumerate(NAMES) if action.leaves >> i & 1 and leaves[n].optimizer in numbers]
        training = [name for name in names if not leaves[name].frozen]
        if not training:
            return
        loss_id = action.loss % self.config.losses
        poisoned = self._poisoned(action, training)
        targets = {name: _target(action.seed, index) for index, name in enumerate(names)}
        scale = self.expected.scalers[loss_id].scale
        gradients = {
            name: self.expected.gradient_of(leaves[name], targets[name], action.factor, scale, poisoned.get(name))
            for name in training
        }
        loss = self._loss(names, targets, action.factor, poisoned)
        for number in numbers:
            self.expected.optimizers[number].cleared(zeros_count=True)
        optimizers = [self.real.optimizers[number] for number in numbers]
        self._pass(loss, optimizers if len(optimizers) > 1 else optimizers[0], loss_id, action)
        # With nothing to unscale, autograd adds in place as it always does, and an exception afterwards is too late.
        identity = self.config.loss_scale == 1.0
        if action.raises == "nowhere":
            self.expected.backward(loss_id, numbers, gradients, action.delay != "no", identity)
        elif action.raises == "after" and identity:
            self.expected.backward(loss_id, (), gradients, True, identity)
        self._check_links(numbers)

    def _poisoned(self, action: Backward, training: list[str]) -> dict[str, float]:
        # Static scaling does not look: one such pass makes everything nan, so most loops go without.
        if action.poison is None or (self.config.loss_scale != "dynamic" and action.seed > 0):
            return {}
        leaf, value = action.poison
        return {training[leaf % len(training)]: value}

    def _loss(self, names: list[str], targets: dict[str, Any], factor: float, poisoned: dict[str, float]) -> Any:
        outputs = self.real.model(torch.ones(1, 1), names)
        loss: Any = 0.0
        for name, output in zip(names, outputs, strict=True):
            loss = loss + (output.float() - torch.tensor(targets[name], dtype=torch.float32)).square().sum() * 0.5
        loss = loss * factor
        for name, value in poisoned.items():
            loss = loss + Poison.apply(self.real.weight(name), value)  # type: ignore[no-untyped-call]
        return loss

    def _pass(self, loss: Any, optimizers: Any, loss_id: int, action: Backward) -> None:
        try:
            with mpinit.scale_loss(loss, optimizers, loss_id, **DELAYS[action.delay]) as scaled:
                if action.raises == "before":
                    raise Stopped
                scaled.backward()
                if action.raises == "after":
                    raise Stopped
        except Stopped:
            pass

    def clear(self, action: Clear) -> None:
        """``zero_grad`` in its three forms."""
        number = self._number(action.which)
        if action.how == "optimizer":
            self.real.optimizers[number].zero_grad(set_to_none=action.to_none)
            self.expected.clear(self.expected.optimizers[number].leaves, action.to_none)
            self.expected.optimizers[number].overflowed = False
        elif action.how == "model":
            self.real.model.zero_grad(set_to_none=action.to_none)
            self.expected.clear(self.expected.leaves.values(), action.to_none)
        else:
            name = NAMES[action.which]
            self.real.weight(name).grad = None
            self.expected.clear([self.expected.leaves[name]], to_none=True)

    def clip(self, action: Clip) -> None:
        """Clipping through ``master_params`` or ``clip_grad_norm_``."""
        number = self._number(action.which)
        optimizer = self.real.optimizers[number]
        leaves = [leaf for leaf in self.expected.optimizers[number].leaves if leaf.gradient is not None]
        if not leaves:
            return  # torch's own clip_grad_value_ raises without gradients
        if action.how == "value":
            torch.nn.utils.clip_grad_value_(mpinit.master_params(optimizer), action.limit)
            for leaf in leaves:
                leaf.gradient = np.clip(leaf.gradient, -action.limit, action.limit)
            return
        norm = np.sqrt(sum((leaf.gradient**2).sum() for leaf in leaves))
        if 3e4 < norm < np.inf:
            return  # a norm of float16 numbers is one itself
        coarse = any(leaf.gradient_type != F32 for leaf in leaves)
        tolerance = HALF_TOLERANCE if coarse else FLOAT32_TOLERANCE
        returned = mpinit.clip_grad_norm_(optimizer, action.limit).item()
        np.testing.assert_allclose(returned, norm, rtol=tolerance)
        with np.errstate(all="ignore"):
            factor = np.minimum(action.limit / (norm + 1e-6), 1.0)
            for name, leaf in self.expected.leaves.items():
                if leaf.optimizer == number and leaf.gradient is not None:
                    real = _numbers(self.real.weight(name).grad)
                    np.testing.assert_allclose(real, leaf.gradient * factor, rtol=tolerance, atol=2.0**-24)
                    leaf.gradient = real

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, action: Step) -> None:
        """The step; after Adam's the reference goes on from the real numbers."""
        number = self._number(action.which)
        optimizer, expected = self.real.optimizers[number], self.expected.optimizers[number]
        for _ in range(action.times):
            done = expected.step()
            if expected.in_a_row >= MAX_SKIPS:
                with pytest.raises(RuntimeError, match="in a row were skipped"):
                    optimizer.step()
            else:
                optimizer.step()
            if done and expected.adam:
                self._go_on_from_adam(number)
            self.check()
            self._check_links([number])
        if self.config.splits:
            self._check_checkpoint(self.real.model.state_dict())
            self.expected.checkpoint()

    def _go_on_from_adam(self, number: int) -> None:
        state_dict = {name: value.clone() for name, value in self.real.model.state_dict().items()}
        self.expected.checkpoint()
        for name, leaf in self.expected.leaves.items():
            if leaf.optimizer == number and leaf.state:
                real = _numbers(state_dict[f"{name}.weight"])
                np.testing.assert_allclose(real, leaf.master, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)
                leaf.master = real
                leaf.follow()
                for key, value in self.real.optimizers[number].state[self.real.stepped(name)].items():
                    np.testing.assert_allclose(
                        _numbers(value, leaf.state[key].shape), leaf.state[key], rtol=FLOAT32_TOLERANCE
                    )
                    leaf.state[key] = _numbers(value, leaf.state[key].shape)

    def schedule(self, action: Schedule) -> None:
        """A scheduler that halves the rate, unless the step was skipped."""
        number = self._number(action.which)
        expected = self.expected.optimizers[number]
        if expected.good + expected.skipped == 0:
            return  # torch warns that no step came before
        mpinit.scheduler_step(self.real.schedulers[number])
        if expected.in_a_row == 0:
            for leaf in expected.leaves:
                leaf.rate /= 2

    # -- weights and groups -------------------------------------------------------------------------------------

    def write(self, action: Write) -> None:
        """Outside writes, and a look that is none."""
        name = NAMES[action.leaf]
        weight, leaf = self.real.weight(name), self.expected.leaves[name]
        values = np.array([action.value, leaf.weight[1], -action.value])
        tensor = torch.tensor(values, dtype=weight.dtype).view_as(weight)
        if action.how in ("data", "assign", "element", "look"):
            leaf.hand_out()
        if action.how == "look":
            weight.data.sum()
            return
        if action.how == "data":
            weight.data.copy_(tensor)
        elif action.how == "assign":
            weight.data = tensor
        elif action.how == "element":
            weight.data[0] = action.value
            values = np.array([action.value, *leaf.weight[1:]])
        else:
            with torch.no_grad():
                weight.copy_(tensor) if action.how == "in place" else weight.mul_(0.5)
            values = values if action.how == "in place" else leaf.weight * 0.5
        leaf.write(values)
        if leaf.optimizer is None or self.real.stepped(name) is weight:
            leaf.adopt()  # no master yet: what was frozen all along, or is in no group

    def freeze(self, action: Freeze) -> None:
        """Switch ``requires_grad``."""
        name = NAMES[action.leaf]
        leaf = self.expected.leaves[name]
        leaf.frozen = not leaf.frozen
        self.real.weight(name).requires_grad_(not leaf.frozen)

    def add(self, action: Add) -> None:
        """A new group with one of the leaves that have no optimizer yet."""
        name, number = NAMES[action.leaf], self._number(action.which)
        leaf = self.expected.leaves[name]
        if leaf.optimizer is not None:
            return
        # What is frozen gets no master yet, and keeps a gradient it should not have in its own type.
        gradient = np.array([1.0, -2.0, 0.5]) if action.gradient and not leaf.frozen else None
        self.real.add(name, number, gradient)
        leaf.adopt()
        leaf.optimizer, leaf.rate, leaf.gradient = number, RATE, gradient
        self.expected.optimizers[number].leaves.append(leaf)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def remember(self, action: Remember | None = None) -> None:
        """Keep the model's state for later."""
        real = {name: value.clone() for name, value in self.real.model.state_dict().items()}
        self.remembered = self.expected.checkpoint(), real
        self._check_checkpoint(real)

    def reload(self, action: Reload) -> None:
        """Go back to it."""
        if self.remembered is not None:
            self.expected.load(self.remembered[0])
            self.real.model.load_state_dict(self.remembered[1])

    def restart(self, action: Restart) -> None:
        """A new process: everything built, initialised and loaded again."""
        saved, added = self.real.checkpoint(), tuple(self.real.added)
        mpinit.undo(self.real.model)
        self.expected.start_afresh()
        self.real = World(self.config, (), added, saved if action.before else None)
        if not action.before:
            self.real.load(saved)
        for name, leaf in self.expected.leaves.items():
            self.real.weight(name).requires_grad_(not leaf.frozen)

    # -- comparing ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that can be seen without changing anything."""
        for name, leaf in self.expected.leaves.items():
            weight = self.real.weight(name)
            assert weight.dtype is DTYPES[leaf.weight_type], name
            _same(weight, leaf.weight, f"weight {name}")
            _same(weight.grad, leaf.gradient, f"gradient of {name}")
            if weight.grad is not None and leaf.optimizer is not None:
                assert weight.grad.dtype is DTYPES[leaf.gradient_type], f"gradient of {name}"
            if leaf.optimizer is not None:
                self._check_optimizer_side(name, leaf)
        self._check_counters()

    def _check_optimizer_side(self, name: str, leaf: Leaf) -> None:
        parameter = self.real.stepped(name)
        if not leaf.split:
            _same(parameter, leaf.master, f"master of {name}")
        state = self.real.optimizers[leaf.optimizer or 0].state.get(parameter, {})
        for key, expected in leaf.state.items():
            _same(state.get(key), expected, f"{key} of {name}")
            if key != "step":
                assert state[key].dtype is DTYPES[leaf.master_type], f"{key} of {name}"
        assert leaf.state or not any(value is not None for value in state.values()), f"state of {name}"

    def _check_counters(self) -> None:
        first = self.real.optimizers[0]
        for index, scaler in enumerate(self.expected.scalers):
            assert mpinit.loss_scale(first, index) == scaler.scale
            state = mpinit.state_dict(first)[f"loss_scaler{index}"]
            assert state["unskipped"] == scaler.unskipped
            assert state.get("tolerance", scaler.tolerance) == scaler.tolerance or scaler.hysteresis == 1
        for optimizer, expected in zip(self.real.optimizers, self.expected.optimizers, strict=True):
            assert mpinit.step_counts(optimizer) == (expected.good, expected.skipped)
            assert mpinit.step_was_skipped(optimizer) == (expected.in_a_row > 0)

    def _check_links(self, numbers: list[int]) -> None:
        """After a backward pass or a step of some optimizers, what a step uses is what the model shows."""
        for name, leaf in self.expected.leaves.items():
            if leaf.optimizer in numbers and not leaf.split:
                assert self.real.stepped(name).grad is self.real.weight(name).grad, f"gradients of {name} came apart"

    def _check_checkpoint(self, state_dict: dict[str, torch.Tensor]) -> None:
        for name, leaf in self.expected.leaves.items():
            # Weights of no optimizer may keep what the cast took away; the law's state machine follows them.
            if not leaf.written and leaf.optimizer is not None:
                assert state_dict[f"{name}.weight"].dtype is torch.float32
                _same(state_dict[f"{name}.weight"], leaf.master, f"state dict's {name}")


def _target(seed: int, index: int) -> Any:
    return np.array([(seed * 5 + index * 3 + element * 2) % 9 - 4 for element in range(SIZE)], dtype=np.float64)


def _numbers(tensor: Any, shape: Any = (SIZE,)) -> Any:
    return tensor.detach().double().reshape(shape).numpy().copy()


def _same(real: torch.Tensor | None, expected: Any, what: str) -> None:
    if real is None or expected is None:
        assert real is None and expected is None, f"{what}: {real} instead of {expected}"
        return
    numbers = _numbers(real, expected.shape)
    assert np.array_equal(numbers, expected, equal_nan=True), f"{what}: {numbers} instead of {expected}"
