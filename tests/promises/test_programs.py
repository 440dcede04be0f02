"""Random programs of what training loops do, under mpinit and in float32 by hand: 2,000 here, 100,000 nightly.

The reference is torch's own SGD over float32 masters and 16-bit weights that are their roundings. Numbers are compared
to the bit after each program, and in the middle of it where the program saves.
"""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpinit

pytestmark = pytest.mark.filterwarnings("ignore:3 steps in a row were skipped")
STORES = {
    "float16": (torch.float16, {"opt_level": "O2", "loss_scale": 8.0, "skip_nonfinite": True}),
    "bfloat16": (torch.bfloat16, {"opt_level": "O5", "skip_nonfinite": True}),
    "split": (torch.bfloat16, {"opt_level": "O5", "master_weights": "split", "skip_nonfinite": True}),
}
RATE, PROGRAMS, NIGHTLY = 2.0**-4, 2000, 100_000
ACTIONS = (
    *("step", "step", "step", "accumulate", "overflow", "copy_", "data", "data =", "swap", "block", "save", "load"),
    *("masters", "freeze", "group", "deepcopy", "undo"),
)


class Net(nn.Module):
    """Three vectors, whose gradients are the numbers that a program chooses."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "c"):
            setattr(self, name, nn.Parameter(torch.randn(3)))

    def forward(self, factors: Tensor) -> Tensor:
        return torch.stack([(getattr(self, name) * factors[index]).sum() for index, name in enumerate("abc")]).sum()


class Program:
    """A model under mpinit with two optimizers, "c" being added later, and the same by hand."""

    def __init__(self, store: str, number: int) -> None:
        self.random = random.Random(number)
        torch.manual_seed(number)
        self.store, (self.dtype, self.keywords) = store, STORES[store]
        self.model, self.stepped = Net(), {"a": 0, "b": 1}
        self.masters = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.used: dict[str, Tensor] = {}  # the masters as they last were in a step, or a user's
        self.momenta: dict[str, Tensor] = {}
        self.frozen: set[str] = set()
        self.saved: dict[str, Tensor] | None = None
        self.optimizers = [torch.optim.SGD([getattr(self.model, n)], lr=RATE, momentum=0.5) for n in "ab"]
        mpinit.initialize(self.model, self.optimizers, verbosity=0, **self.keywords)
        self.mastered: set[str] = set()
        self.remainders: dict[str, Tensor] = {}
        self.begin()
        self.kept: list[Any] = []

    def begin(self) -> None:
        """Round what has no master: its rounding is its value."""
        self.mastered = {*self.stepped} - self.frozen
        for name in "abc":
            self.set(name, self.masters[name])

    def set(self, name: str, values: Tensor) -> None:
        """Set the float32 values of a weight."""
        self.masters[name] = self.used[name] = values if name in self.mastered else values.to(self.dtype).float()
        if self.store == "split":
            wide = self.rounded(self.masters[name]).float()
            self.remainders[name] = self.masters[name].view(torch.int32) - wide.view(torch.int32)

    def rounded(self, master: Tensor) -> Tensor:
        if self.store != "split":
            return master.to(self.dtype)
        return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)

    def written(self, name: str, values: Tensor) -> None:
        """Apply the law to a weight that was written to."""
        weight = values.to(self.dtype)
        wide = weight.float()
        if name not in self.mastered:
            self.masters[name] = wide
        elif self.store == "split":
            joined = (wide.view(torch.int32) + self.remainders[name]).view(torch.float32)
            self.masters[name] = torch.where((weight == 0) | ~weight.isfinite(), wide, joined)
        else:  # evaluated where masters are used, so a number that is written back keeps its lower bits
            self.masters[name] = torch.where(self.rounded(self.used[name]) == weight, self.used[name], wide)

    def run(self, action: str) -> None:
        getattr(self, "do_" + action.replace(" =", "_set"))()

    def backward(self, factors: list[list[float]]) -> None:
        numbers = torch.tensor(factors).to(self.dtype)
        with mpinit.scale_loss(self.model(numbers), self.optimizers) as scaled_loss:
            scaled_loss.backward()

    def step(self, count: int = 1, bad: bool = False) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        sums = torch.zeros(3, 3)
        for _ in range(count):
            factors = [[self.random.choice((-2.0, -0.5, 0.25, 1.0)) for _ in range(3)] for _ in range(3)]
            if bad:
                factors[self.stepped_index()][0] = float("inf")
            self.backward(factors)
            sums += torch.tensor(factors)
        for optimizer in self.optimizers:
            optimizer.step()
        self.mastered |= {*self.stepped} - self.frozen
        for name in self.stepped:
            gradient = sums["abc".index(name)]
            if not self.whole_optimizer_is_finite(name, sums):
                continue
            if name in self.frozen:
                continue
            known = self.momenta.get(name)
            momentum = gradient.clone() if known is None else known * 0.5 + gradient
            self.momenta[name] = momentum
            self.set(name, torch.add(self.masters[name], momentum, alpha=-RATE))

    def stepped_index(self) -> int:
        return "abc".index(self.random.choice([n for n in self.stepped if n not in self.frozen] or ["a"]))

    def whole_optimizer_is_finite(self, name: str, sums: Tensor) -> bool:
        mine = [n for n, index in self.stepped.items() if index == self.stepped[name] and n not in self.frozen]
        return all(bool(sums["abc".index(n)].isfinite().all()) for n in mine)

    def do_step(self) -> None:
        self.step()

    def do_accumulate(self) -> None:
        self.step(3)

    def do_overflow(self) -> None:
        self.step(bad=True)

    def place(self) -> tuple[str, nn.Parameter, Tensor]:
        name = self.random.choice("abc")
        weight = getattr(self.model, name)
        values = weight.detach().clone()
        # A step may or may not renew the remainder of a frozen split weight: it shows where a 0 was written between.
        other = 0.5 if self.store == "split" else 0.0
        values[self.random.randrange(3)] = self.random.choice((other, 0.3, -1.7, 3e-5))
        return name, weight, values

    def do_copy_(self) -> None:
        name, weight, values = self.place()
        weight.detach().copy_(values)
        self.written(name, values)

    def do_data(self) -> None:
        name, weight, values = self.place()
        weight.data.copy_(values)
        self.written(name, values)

    def do_data_set(self) -> None:
        name, weight, values = self.place()
        weight.data = values
        self.written(name, values)

    def do_swap(self) -> None:
        """Evaluate with other weights, and restore: nothing has changed."""
        own = [weight.detach().clone() for weight in self.model.parameters()]
        for weight in self.model.parameters():
            weight.data.copy_(torch.full_like(weight, 0.7))
        with torch.no_grad():
            self.model(torch.ones(3, 3))
        for weight, value in zip(self.model.parameters(), own, strict=True):
            weight.data.copy_(value)

    def do_block(self) -> None:
        with mpinit.float32_weights(self.model), torch.no_grad():
            for name, parameter in self.model.named_parameters():
                factor = self.random.choice((0.9, 1.0))
                parameter.mul_(factor)
                self.set(name, self.masters[name] * factor)

    def do_save(self) -> None:
        self.check()
        self.saved = copy.deepcopy(self.model.state_dict())

    def do_load(self) -> None:
        if self.saved is not None:
            self.model.load_state_dict(self.saved)
            for name, value in self.saved.items():
                self.set(name, value.clone())

    def do_masters(self) -> None:
        self.kept = [list(mpinit.master_params(optimizer)) for optimizer in self.optimizers]
        self.used = dict(self.masters)
        index = self.random.randrange(2)
        name, master = "ab"[index], self.kept[index][0]
        if master.dtype is torch.float32:
            with torch.no_grad():
                master.mul_(1.1)
            self.set(name, self.masters[name] * 1.1)
            self.model(torch.ones(3, 3))  # rounds it into its weight: both written, differently, would be an error

    def do_freeze(self) -> None:
        name = self.random.choice("ab")
        weight = getattr(self.model, name)
        weight.requires_grad_(not weight.requires_grad)
        self.frozen ^= {name}
        self.step()

    def do_group(self) -> None:
        if "c" not in self.stepped:
            self.optimizers[1].add_param_group({"params": [self.model.c]})
            self.stepped["c"] = 1
            self.step()

    def do_deepcopy(self) -> None:
        for name, parameter in copy.deepcopy(self.model).named_parameters():
            assert torch.equal(parameter, self.masters[name]), name

    def do_undo(self) -> None:
        mpinit.undo(self.model)
        self.kept = []
        for name, parameter in self.model.named_parameters():
            assert torch.equal(parameter, self.masters[name]), name
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        mpinit.initialize(self.model, self.optimizers, verbosity=0, **self.keywords)
        self.begin()

    def check(self) -> None:
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, self.masters[name]), (name, value, self.masters[name])
        for masters, optimizer in zip(self.kept, self.optimizers, strict=False):
            pairs = zip(masters, mpinit.master_params(optimizer), strict=False)
            # A weight that was frozen when the list was made has no master in it.
            assert all(one is other for one, other in pairs if one.dtype is torch.float32)


def play(first: int, count: int) -> None:
    for number in range(first, first + count):
        store = list(STORES)[number % len(STORES)]
        program, done = Program(store, number), []
        try:
            for _ in range(program.random.randint(3, 10)):
                done.append(program.random.choice(ACTIONS))
                program.run(done[-1])
            program.check()
        except AssertionError as error:
            error.add_note(f"program {number}: {store}, {', '.join(done)}")
            raise
        finally:
            mpinit.undo(program.model)


@pytest.mark.parametrize("part", range(4))
def test_2000_random_programs_are_those_by_hand(part: int) -> None:
    play(part * PROGRAMS // 4, PROGRAMS // 4)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(16))
def test_100000_random_programs_are_those_by_hand(part: int) -> None:
    play(PROGRAMS + part * NIGHTLY // 16, NIGHTLY // 16)
