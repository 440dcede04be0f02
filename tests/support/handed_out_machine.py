"""Sequences of what users do with float32 numbers that were handed out, drawn by hypothesis and judged by an oracle.

Every rule does something to the model under mpinit and the same to the model by hand. ``Training.read`` judges what a
read does about the writes before it: numbers have to be those by hand to the bit, or the write has to be refused by
name, where the oracle allows it (``handed_out.py``).
"""

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from handed_out import Alone, Training, adamw, batch, sgd
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor, nn

import mpinit

# The tied weight, a vector, and a frozen weight.
NAMES = st.sampled_from(["first.weight", "norm.weight", "last.weight"])
TRAINED = st.sampled_from(["first.weight", "norm.weight"])
VALUES = st.sampled_from([0.5, -1.0, 0.0, 1.0001, -0.3337])
GRADIENTS = st.sampled_from([None, 0.5, -0.25])

# Writes to a tensor: how much of it, and by what number.
WRITES: dict[str, Callable[[Any, float], Any]] = {
    "first element": lambda tensor, value: tensor[:1].fill_(value),
    "others": lambda tensor, value: tensor[1:].fill_(value),
    "last by a view": lambda tensor, value: tensor.view(-1)[-1:].fill_(value),
    "all": lambda tensor, value: tensor.copy_(torch.full_like(tensor, value)),
    "halved": lambda tensor, value: tensor.mul_(0.5),
    "clamped": lambda tensor, value: tensor.clamp_(-abs(value), abs(value)),
    "nothing": lambda tensor, value: tensor.mul_(1.0),
}
HOWS = st.sampled_from(sorted(WRITES))


class HandedOut(RuleBasedStateMachine):
    """A training, and what its user has kept: state dicts, the list of masters, weights exchanged for an evaluation."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*did not come through mpinit.scale_loss.*")
        warnings.filterwarnings("ignore", message=".*none of its parameters has a gradient.*")
        self.states: list[dict[str, Tensor]] = []
        self.masters: list[Any] | None = None
        self.saved: dict[str, Tensor] | None = None
        self.exchanged: dict[str, Tensor] | None = None
        self.replaced: str | None = None
        self.training: Any = None

    @initialize(make=st.sampled_from([sgd, adamw]))
    def start(self, make: Any) -> None:
        """Dynamic scaling, so that steps can be skipped; the scale stays small."""
        self.training = Training(
            self.kind,
            make,
            loss_scale=mpinit.DynamicLossScale(init=8.0, growth_interval=10**6, max_consecutive_skips=10**6),
        )

    def teardown(self) -> None:
        """At the end everything is compared, and float32 after the undo."""
        try:
            if self.training is not None:
                self._undo()
        finally:
            self.stack.close()
            if self.training is not None:
                with contextlib.suppress(ValueError, RuntimeError):
                    mpinit.undo(self.training.model)

    # -- reading ------------------------------------------------------------------------------------------------

    @rule()
    def look(self) -> None:
        """Read a state dict and drop it."""
        self.training.check()

    @rule()
    def forward(self) -> None:
        """Run the model."""
        self.training.forward()
        self._gradients_were_read()

    @rule()
    def copied(self) -> None:
        """Copy the model."""
        found = self.training.read(lambda: copy.deepcopy(self.training.model))
        self._compare({name: parameter.detach().float() for name, parameter in found.named_parameters()}, "copied")

    @rule()
    def saved_as_a_whole(self) -> None:
        """Read a TrainState."""
        whole = mpinit.TrainState(self.training.model, self.training.optimizer)
        self._compare(self.training.read(whole.state_dict)["model"], "in a TrainState")

    def _compare(self, found: dict[str, Tensor], where: str) -> None:
        for name, weight in self.training.by_hand.weights.items():
            weight.check(found[name], f"{name} {where}")

    # -- entries, masters, weights: kept and written to ---------------------------------------------------------

    @rule()
    def keep_a_state_dict(self) -> None:
        """Take a state dict, and keep it."""
        self.states.append(self.training.state_dict(keep=True))
        del self.states[:-3]

    @precondition(lambda self: self.states)
    @rule(number=st.integers(0, 2), name=NAMES, how=HOWS, value=VALUES)
    def write_to_an_entry(self, number: int, name: str, how: str, value: float) -> None:
        """Write to an entry of a state dict that was kept."""
        state = self.states[number % len(self.states)]
        known = [each for each in self.training.references if each.tensor is state[name]]
        if self.training.kind.copies and not known:
            return  # it was refused before, and dropped
        with torch.no_grad():
            WRITES[how](state[name], self._fitting(name, value))
        if not self.training.kind.copies:
            self.training.wrote(name)

    @precondition(lambda self: self.states)
    @rule(number=st.integers(0, 2), how=HOWS, value=VALUES)
    def write_to_all_entries(self, number: int, how: str, value: float) -> None:
        """Write to all entries of a state dict that was kept."""
        for name in self.training.names:
            self.write_to_an_entry(number, name, how, value)

    @rule()
    def ask_for_masters(self) -> None:
        """Ask for masters: the list is kept, and is the same ever after."""
        given = self.training.masters()
        assert self.masters is None or all(a is b for a, b in zip(self.masters, given, strict=True))
        self.masters = given
        self._gradients_were_read()

    @precondition(lambda self: self.masters)
    @rule(name=TRAINED, how=HOWS, value=VALUES, by_data=st.booleans())
    def write_to_a_master(self, name: str, how: str, value: float, by_data: bool) -> None:
        """Write to a master of the kept list."""
        master = self._master(name)
        with torch.no_grad():
            WRITES[how](master.data if by_data else master, self._fitting(name, value))
        if not self.training.kind.masters:
            self.training.wrote(name)

    @rule(name=NAMES, how=HOWS, value=VALUES, by_data=st.booleans())
    def write_to_a_weight(self, name: str, how: str, value: float, by_data: bool) -> None:
        """Write to a parameter of the model."""
        value = self._fitting(name, value)
        self.training.write(name, lambda weight: WRITES[how](weight.data if by_data else weight, value))

    def _fitting(self, name: str, value: float) -> float:
        """A number that a weight can hold: where there is no master, one of 16 bits."""
        weight = self.training.by_hand.weights[name]
        has_master = name in self.training.trained and not isinstance(weight.store, Alone)
        return value if has_master or self.kind == "model" else torch.tensor(value).bfloat16().item()

    def _master(self, name: str) -> Any:
        assert self.masters is not None
        return self.masters[self.training.trained.index(name)]

    @precondition(lambda self: self.exchanged is None)
    @rule(value=VALUES, by_data=st.booleans())
    def exchange(self, value: float, by_data: bool) -> None:
        """Put other numbers into all weights, for an evaluation."""
        training = self.training
        self.exchanged = {name: training.weight(name).detach().clone() for name in training.names}
        for name in training.names:
            self.write_to_a_weight(name, "all", value, by_data)

    @precondition(lambda self: self.exchanged is not None)
    @rule(by_data=st.booleans())
    def exchange_back(self, by_data: bool) -> None:
        """Put the numbers of before back: low bits are those of before, unless trained since."""
        kept, self.exchanged = self.exchanged, None
        for name, values in (kept or {}).items():
            self.training.write(name, lambda weight, v=values: (weight.data if by_data else weight).copy_(v))

    # -- gradients and steps ------------------------------------------------------------------------------------

    @rule()
    def backward(self) -> None:
        """A forward and a backward pass, whose gradients are added to those before."""
        self.training.backward()
        self._gradients_were_read()
        for name in self.training.trained if self.masters else ():
            assert self._master(name).grad is self.training.weight(name).grad, f"gradient of master {name}"

    @rule()
    def overflow(self) -> None:
        """A backward pass that overflows, and a step that is skipped."""
        self.training.backward(overflows=True)
        self.training.read(self.training.optimizer.step)
        assert mpinit.step_was_skipped(self.training.optimizer)
        self.training.zero_grad()
        self._gradients_were_read()

    def _has_gradients(self) -> bool:
        return any(gradient is not None for gradient in self.training.by_hand.gradients.values())

    def _gradients_were_read(self) -> None:
        self.replaced = None
        self.training.check_gradients()

    @precondition(lambda self: self._has_gradients())
    @rule()
    def step(self) -> None:
        """A step; gradients are cleared after it."""
        if any(len(weight.meanings) > 1 for weight in self.training.by_hand.weights.values()):
            self.training.check()  # which of the numbers that are allowed they are
        self.training.step()
        self.training.zero_grad()
        self._gradients_were_read()

    @rule()
    def iterate(self) -> None:
        """A whole iteration: every weight that is trained moves."""
        self.zero_grad()
        self.backward()
        self.step()

    @rule()
    def zero_grad(self) -> None:
        """Clear all gradients."""
        if self.replaced is not None:
            self.forward()
        self.training.zero_grad()

    @precondition(lambda self: self._has_gradients())
    @rule(way=st.sampled_from(["weights", "kept masters", "masters", "mpinit"]))
    def clip(self, way: str) -> None:
        """Clip the norm of all gradients."""
        training, optimizer = self.training, self.training.optimizer
        if self.replaced is not None:
            self.forward()
        if way == "kept masters" and self.masters is None:
            return
        if way == "kept masters":
            self.ask_for_masters()
        by_hand = {name: g for name, g in training.by_hand.gradients.items() if g is not None}
        norm = torch.stack([gradient.norm() for gradient in by_hand.values()]).norm().item()
        if norm == 0.0:
            return
        if way == "weights":
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), norm / 2)
        elif way == "kept masters":
            torch.nn.utils.clip_grad_norm_(self.masters or [], norm / 2)
        elif way == "masters":
            torch.nn.utils.clip_grad_norm_(training.read(lambda: list(mpinit.master_params(optimizer))), norm / 2)
        else:
            training.read(lambda: mpinit.clip_grad_norm_(optimizer, norm / 2))
        for weight in training.by_hand.weights.values():
            weight.follow()
        for name, gradient in by_hand.items():
            real = training.weight(name).grad.detach().float()
            torch.testing.assert_close(real, gradient / 2, rtol=2**-6, atol=2**-20, msg=f"clipped gradient of {name}")
            training.by_hand.gradients[name] = real.clone()

    @rule(name=TRAINED, value=GRADIENTS, side=st.sampled_from(["weight", "master"]))
    def replace_a_gradient(self, name: str, value: float | None, side: str) -> None:
        """Replace or clear a gradient, on the weight or on the kept master."""
        if side == "master" and self.masters is None:
            return
        if self.replaced is not None:
            self.forward()
        weight = self.training.weight(name)
        owner = self._master(name) if side == "master" else weight
        dtype = owner.grad_dtype or owner.dtype
        owner.grad = None if value is None else torch.full_like(owner, value, dtype=dtype).detach()
        self.training.by_hand.gradients[name] = None if value is None else torch.full(owner.shape, value)
        self.replaced = name

    @precondition(lambda self: self._has_gradients())
    @rule(name=TRAINED, side=st.sampled_from(["weight", "master"]), by_data=st.booleans())
    def halve_a_gradient(self, name: str, side: str, by_data: bool) -> None:
        """Write to a gradient in place."""
        if self.replaced is not None or (side == "master" and self.masters is None):
            return
        if side == "master":
            self.ask_for_masters()
        owner = self._master(name) if side == "master" else self.training.weight(name)
        before = self.training.by_hand.gradients[name]
        if before is not None:
            (owner.grad.data if by_data else owner.grad).mul_(0.5)
            self.training.by_hand.gradients[name] = before * 0.5

    # -- checkpoints, blocks, undo ------------------------------------------------------------------------------

    @rule()
    def save(self) -> None:
        """Save the weights."""
        self.saved = {name: value.clone() for name, value in self.training.state_dict().items()}

    @precondition(lambda self: self.saved)
    @rule(part=st.sampled_from(["", "norm."]))
    def load(self, part: str) -> None:
        """Load all weights, or some."""
        saved = {name: value for name, value in (self.saved or {}).items() if name.startswith(part)}

        def by_hand() -> None:
            for name, weight in self.training.by_hand.weights.items():
                if name in saved:
                    weight.assign(saved[name])

        self.training.read(lambda: self.training.model.load_state_dict(saved, strict=False), then=by_hand)

    @rule(
        writes=st.lists(st.tuples(NAMES, HOWS, VALUES, st.sampled_from(["op", "data", "put"])), max_size=2),
        runs=st.booleans(),
        halves=st.booleans(),
    )
    def block(self, writes: list[tuple[str, str, float, str]], runs: bool, halves: bool) -> None:
        """A ``float32_weights`` block: read, written to, and run inside."""
        training, found = self.training, {}
        if self.replaced is not None:
            self.forward()
        with contextlib.ExitStack() as stack:
            training.check_weights, check = lambda: None, training.check_weights  # inside they are others
            try:
                training.read(lambda: stack.enter_context(mpinit.float32_weights(training.model)))
                self._inside(writes, runs, halves)
                found = {name: training.weight(name).detach().clone() for name in training.names}
            finally:
                training.check_weights = check
        for name, weight in training.by_hand.weights.items():
            weight.follow()
            changed = found[name] != weight.meaning
            if bool(changed.any()):
                weight.assign_where(changed, found[name])
        for reference in training.references:
            if reference.is_master:
                reference.hand_out(training.by_hand.weights[reference.name])
        training.check_weights()
        training.check_gradients()

    def _inside(self, writes: list[tuple[str, str, float, str]], runs: bool, halves: bool) -> None:
        training = self.training
        self._compare({name: training.weight(name) for name in training.names}, "inside")
        groups = [parameter for group in training.optimizer.param_groups for parameter in group["params"]]
        assert all(training.weight(name) is parameter for name, parameter in zip(training.trained, groups, strict=True))
        if runs:
            x = batch(99)
            expected = training.by_hand.forward(x, torch.float32 if self.kind != "model" else None)
            torch.testing.assert_close(training.model(x).float(), expected.float(), rtol=2**-6, atol=2**-6)
        for name, gradient in training.by_hand.gradients.items():
            if halves and gradient is not None:
                training.weight(name).grad.mul_(0.5)
                training.by_hand.gradients[name] = gradient * 0.5
        for name, how, value, way in writes:
            value, parameter = self._fitting(name, value), training.weight(name)
            if way == "put" and name.startswith("norm") and self.kind != "model":
                new = nn.Parameter(parameter.detach().clone())
                new.grad = parameter.grad
                setattr(training.model.norm, name.removeprefix("norm."), new)
                parameter = new
            with torch.no_grad():
                WRITES[how](parameter.data if way == "data" else parameter, value)

    @rule()
    def undo_and_initialize_again(self) -> None:
        """Undo: weights are what they mean in float32. Then all begins anew."""
        self._undo()
        training = self.training
        values = {name: training.weight(name).detach().clone() for name in training.names}
        mpinit.initialize(training.model, training.optimizer, **training.keywords)
        for name, weight in training.by_hand.weights.items():
            weight.assign(values[name])
        self.states.clear()
        training.references.clear()
        self.masters, self.exchanged = None, None
        training.check_weights()

    def _undo(self) -> None:
        training = self.training
        training.zero_grad()
        self.replaced = None
        training.check_weights, check = lambda: None, training.check_weights  # they are float32 then
        try:
            training.read(lambda: mpinit.undo(training.model))
        finally:
            training.check_weights = check
        self._compare({name: training.weight(name) for name in training.names}, "undone")
