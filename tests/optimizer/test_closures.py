"""Steps with closures and steps in two halves: masters, scaling, and overflows in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import backward, batches, follow, masters, mlp, momentum, mse, poison, same, start
from masters_by_hand import SETTINGS, ByHand
from torch import nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

import mpinit

pytestmark = pytest.mark.device

LEVELS = ("O0", "O1", "O2")


class Sam(Optimizer):
    """Sharpness-aware minimisation as it is commonly written: two evaluations a step, around another optimizer."""

    def __init__(self, params: Any, base: Callable[..., Optimizer], rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        with_gradient = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in with_gradient if p.grad is not None]).norm()
        for parameter in with_gradient:
            assert parameter.grad is not None
            self.state[parameter]["old"] = parameter.detach().clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()
        evaluate()
        for parameter in with_gradient:
            parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()
        self.zero_grad()
        return loss


def sam(params: Any) -> Sam:
    return Sam(params, SGD, lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": momentum,
    "adam": lambda p: Adam(p, lr=0.01),
    "sam": sam,
    "lbfgs": lambda p: LBFGS(p, lr=0.5, max_iter=4, history_size=3),
    "lbfgs strong wolfe": lambda p: LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
}


def closure_of(model: nn.Module, optimizer: Optimizer, batch: Any, scaled: bool = True) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mse(model, batch)
        backward(loss, optimizer) if scaled else loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("evaluation", [0, 1])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_inside_an_evaluation_lowers_the_scale_and_repeats_it(level: str, evaluation: int) -> None:
    batch = batches(1)[0]

    def run(bad: int | None, scale: float) -> tuple[Optimizer, int]:
        model, calls = mlp(), 0
        optimizer = start(model, level, make=sam, init_loss_scale=scale)

        def closure() -> torch.Tensor:
            nonlocal calls
            optimizer.zero_grad()
            loss = mse(model, batch)
            backward(poison(loss, next(model.parameters())) if calls == bad else loss, optimizer)
            calls += 1
            return loss

        optimizer.step(closure)
        assert not mpinit.step_was_skipped(optimizer)
        return optimizer, calls

    (repeated, calls), (clean, clean_calls) = run(evaluation, 128.0), run(None, 64.0)
    assert (calls, clean_calls) == (3, 2) and mpinit.loss_scale(repeated) == 64.0
    for got, expected in zip(masters(repeated), masters(clean), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_giving_up_is_bounded_and_leaves_the_parameters_as_before(level: str, name: str) -> None:
    model, batch, calls = mlp(), batches(1)[0], 0
    optimizer = start(model, level, make=OPTIMIZERS[name], max_consecutive_skips=8)
    optimizer.step(closure_of(model, optimizer, batch))
    before, weights = masters(optimizer), [p.detach().clone() for p in model.parameters()]

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = mse(model, batch)
        backward(poison(loss, next(model.parameters())) if calls > 1 else loss, optimizer)
        return loss

    # One step of these takes one evaluation: the first overflows.
    calls = 1 if name in ("sgd", "adam") else 0
    assert optimizer.step(closure) is None
    assert calls == 9
    assert mpinit.step_was_skipped(optimizer) and mpinit.step_counts(optimizer) == (1, 1)
    same(masters(optimizer), before)
    same([p.detach() for p in model.parameters()], weights)
    assert all(parameter.grad is None for parameter in mpinit.master_params(optimizer))
    optimizer.step(closure_of(model, optimizer, batch))
    assert not mpinit.step_was_skipped(optimizer)
    assert not torch.equal(masters(optimizer)[0], before[0])


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_in_a_closure_passes_through(level: str) -> None:
    model, batch = mlp(), batches(1)[0]
    optimizer = start(model, level, make=sam)
    before, calls = masters(optimizer), 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyError("mine")
        return closure_of(model, optimizer, batch)()

    with pytest.raises(KeyError, match="mine"):
        optimizer.step(closure)
    if level != "O0":
        same(masters(optimizer), before)
    if level == "O2":
        follow(model, optimizer)


def test_casts_are_off_in_the_step_and_on_again_in_its_closure() -> None:
    model, batch, seen = mlp(), batches(1)[0], []

    class Looking(SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().step(closure)

    optimizer = start(model, "O1", make=lambda p: Looking(p, lr=0.1))

    def closure() -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return closure_of(model, optimizer, batch)()

    optimizer.step(closure)
    assert seen == [False, True] and torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_steps_with_a_closure_are_those_by_hand(setting: str, name: str, scaled: bool) -> None:
    model, by_hand, batch = mlp(), ByHand(mlp(), setting, OPTIMIZERS[name]), batches(1)[0]
    optimizer = OPTIMIZERS[name](model.parameters())
    mpinit.initialize(model, optimizer, verbosity=0, split_bucket_bytes=256, **SETTINGS[setting])

    def evaluate() -> torch.Tensor:
        by_hand.follow()
        by_hand.clear()
        loss = by_hand.backward(batch)
        for master, gradient in zip(by_hand.masters, by_hand.gradients, strict=True):
            master.grad = gradient.float()  # type: ignore[union-attr]
        return loss

    for _ in range(3):
        loss = optimizer.step(closure_of(model, optimizer, batch, scaled))
        assert torch.equal(loss.detach(), by_hand.optimizer.step(evaluate))
        by_hand.follow()
        same(model.state_dict().values(), by_hand.masters)
        same(model.parameters(), by_hand.model.parameters())


class Sharpness(SGD):
    """Climbs first and descends then."""

    def first_step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["climb"] = parameter.grad.clone()
                parameter.add_(parameter.grad, alpha=0.05)

    def second_step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(self.state[parameter]["climb"], alpha=0.05)
        self.step()


def test_a_step_in_two_halves_is_right() -> None:
    model = mlp()
    optimizer = Sharpness(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", verbosity=0)
    batch = batches(1)[0]
    backward(mse(model, batch), optimizer)
    start = masters(optimizer)
    gradients = [p.grad.clone() for p in mpinit.master_params(optimizer)]  # type: ignore[union-attr]
    optimizer.first_step()
    for weight, value, gradient in zip(model.parameters(), start, gradients, strict=True):
        assert torch.equal(weight, (value + 0.05 * gradient).bfloat16()), "the model is where the first half went"
    optimizer.zero_grad()
    backward(mse(model, batch), optimizer)
    climbed = [p.grad.clone() for p in mpinit.master_params(optimizer)]  # type: ignore[union-attr]
    optimizer.second_step()
    for master, value, gradient in zip(masters(optimizer), start, climbed, strict=True):
        torch.testing.assert_close(master, value - 0.1 * gradient, rtol=1e-6, atol=1e-7)


class SharpnessOf(Optimizer):
    """Two halves around another optimizer, which it alone steps; a whole step is made of both."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = SGD(self.param_groups, lr=0.1, momentum=0.9, weight_decay=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.05)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter].pop("old"))
        self.base.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()


def climbing_by_hand(data: list[Any]) -> tuple[nn.Module, Optimizer]:
    """Float16 with float32 masters, written out; the scale does not matter, a power of 2."""
    model, reference = mlp(), mlp()
    optimizer = SharpnessOf(reference.parameters())
    for batch in data:
        for half in (optimizer.first_step, optimizer.second_step):
            model = mlp().half()
            model.load_state_dict(reference.state_dict())
            (1024 * nn.functional.mse_loss(model(batch[0].half()).float(), batch[1])).backward()
            for weight, master in zip(model.parameters(), reference.parameters(), strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float() / 1024
            half()
    return reference, optimizer


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("overflows_in", ["first", "second"])
def test_a_step_in_two_halves_skips_both_on_overflow(overflows_in: str, whole: bool) -> None:
    model, data = mlp(), batches(6)
    optimizer = SharpnessOf(model.parameters())
    mpinit.initialize(model, optimizer, "O2", init_loss_scale=1024.0, verbosity=0)
    bad = {"first": 0, "second": 1}[overflows_in]
    for number, batch in enumerate(data):
        evaluations = 0

        def evaluate(number: int = number, batch: Any = batch) -> torch.Tensor:
            nonlocal evaluations
            optimizer.zero_grad()
            loss = mse(model, batch)
            overflows = number == 2 and evaluations == bad
            evaluations += 1
            backward(poison(loss, model[0].weight) if overflows else loss, optimizer)
            return loss

        evaluate()
        if whole:
            optimizer.step(evaluate)
        else:
            optimizer.first_step(zero_grad=True)
            evaluate()
            optimizer.second_step(zero_grad=True)
    # A closure is evaluated again.
    done = data if whole and bad else data[:2] + data[3:]
    reference, by_itself = climbing_by_hand(done)
    same(masters(optimizer), reference.parameters())
    assert mpinit.loss_scale(optimizer) == 512.0
    assert mpinit.step_counts(optimizer) == (len(done), len(data) - len(done))
    mpinit.undo(model)
    same(model.parameters(), reference.parameters())
    momenta = [
        [each.base.state[p]["momentum_buffer"] for p in each.param_groups[0]["params"]]
        for each in (optimizer, by_itself)
    ]
    same(*momenta)


def test_halves_step_what_a_plain_backward_left_where_nothing_is_scaled() -> None:
    model, batch = mlp(), batches(1)[0]
    optimizer = SharpnessOf(model.parameters())
    mpinit.initialize(model, optimizer, "O5", verbosity=0)
    start = masters(optimizer)
    mse(model, batch).backward()
    optimizer.first_step(zero_grad=True)
    assert not any(torch.equal(a, b) for a, b in zip(start, masters(optimizer), strict=True))
    mse(model, batch).backward()
    optimizer.second_step(zero_grad=True)
    assert mpinit.step_counts(optimizer) == (1, 0)
