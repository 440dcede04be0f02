"""Steps with closures and steps in two halves: masters, scaling, and overflows in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import adam, backward, batches, follow, gradients, masters, mlp, momentum, mse, poison, same, started
from masters_by_hand import SETTINGS, ByHand
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer

import mpinit
from mpinit.optimizer import parts

pytestmark = pytest.mark.device

BATCH = batches(1)[0]
LEVELS = ("O0", "O1", "O2", "O5")
FIXED: dict[str, Any] = {"loss_scale": 128.0}


class Sam(Optimizer):
    """Sharpness-aware minimisation as it is commonly written: two evaluations a step, around another optimizer."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho, "lr": 0.1, "momentum": 0.9})
        self.base_optimizer = SGD(self.param_groups, lr=0.1, momentum=0.9)
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


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": momentum,
    "adam": adam,
    "sam": Sam,
    "lbfgs": lambda p: LBFGS(p, lr=0.5, max_iter=4, history_size=3),
    "lbfgs strong wolfe": lambda p: LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
}


class Closure:
    """An evaluation of the loss, which overflows in the calls that ``overflows`` says so of; it counts its calls."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, scaled: bool = True, overflows: Any = None) -> None:
        self.model, self.optimizer, self.scaled = model, optimizer, scaled
        self.overflows: Callable[[int], bool] = overflows or (lambda call: False)
        self.calls = 0

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = mse(self.model, BATCH)
        spoiled = poison(loss, next(self.model.parameters())) if self.overflows(self.calls) else loss
        self.calls += 1
        backward(spoiled, self.optimizer) if self.scaled else spoiled.backward()
        return loss


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_closure_is_refused_where_the_scale_is_dynamic(level: str, name: str) -> None:
    model, optimizer = started(level, make=OPTIMIZERS[name])
    before = masters(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(closure\) evaluates the loss .*opt_level='O5', .*loss_scale=128.0"):
        optimizer.step(Closure(model, optimizer))
    same(masters(optimizer), before)
    mpinit.undo(model)
    mpinit.initialize(model, optimizer, level, **FIXED)
    optimizer.step(Closure(model, optimizer))
    assert mpinit.step_counts(optimizer) == (1, 0)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_nan_in_a_closure_skips_that_step_once(level: str, name: str, scaled: bool) -> None:
    """Restore the weights, also where an earlier evaluation of the step was finite; the next step evaluates anew."""
    fixed = FIXED if scaled else {"loss_scale": 1.0}
    model, optimizer = started(level, make=OPTIMIZERS[name], skip_nonfinite=True, **fixed)
    optimizer.step(Closure(model, optimizer, scaled))
    before, weights = masters(optimizer), [p.detach().clone() for p in model.parameters()]
    # One step of SGD and Adam takes one evaluation.
    first = 0 if name in ("sgd", "adam") else 1
    closure = Closure(model, optimizer, scaled, overflows=lambda call: call == first)
    assert optimizer.step(closure) is None
    assert closure.calls == first + 1
    assert mpinit.step_was_skipped(optimizer) and mpinit.step_counts(optimizer) == (1, 1)
    same(masters(optimizer), before)
    same([p.detach() for p in model.parameters()], weights)
    optimizer.step(closure)
    assert mpinit.step_counts(optimizer) == (2, 1)
    assert not torch.equal(masters(optimizer)[0], before[0])
    if level != "O1":
        follow(model, optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_in_a_closure_passes_through(level: str) -> None:
    model, optimizer = started(level, make=Sam, skip_nonfinite=True, **({} if level in ("O0", "O5") else FIXED))
    before = masters(optimizer)

    def fail_in_second(call: int) -> bool:
        if call == 1:
            raise KeyError("mine")
        return False

    with pytest.raises(KeyError, match="mine"):
        optimizer.step(Closure(model, optimizer, overflows=fail_in_second))
    same(masters(optimizer), before)
    if level in ("O2", "O5"):
        follow(model, optimizer)


def test_casts_are_off_in_the_step_and_on_again_in_its_closure() -> None:
    seen = []

    def look(*_: Any) -> bool:
        seen.append(torch.is_autocast_enabled("cpu"))
        return False

    class Looking(SGD):
        def step(self, closure: Any = None) -> Any:
            look()
            return super().step(closure)

    model, optimizer = started("O1", make=lambda p: Looking(p, lr=0.1), **FIXED)
    optimizer.step(Closure(model, optimizer, overflows=look))
    assert seen == [False, True] and torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_steps_with_a_closure_are_those_by_hand(
    setting: str, name: str, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, by_hand = mlp(), ByHand(mlp(), setting, OPTIMIZERS[name])
    optimizer = OPTIMIZERS[name](model.parameters())
    monkeypatch.setattr(parts, "BUCKET_BYTES", 256)
    mpinit.initialize(model, optimizer, **SETTINGS[setting])

    def evaluate() -> torch.Tensor:
        by_hand.follow()
        by_hand.clear()
        loss = by_hand.backward(BATCH)
        for master, gradient in zip(by_hand.masters, by_hand.gradients, strict=True):
            master.grad = gradient.float()  # type: ignore[union-attr]
        return loss

    for _ in range(3):
        loss = optimizer.step(Closure(model, optimizer, scaled))
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


def test_sam_step_in_two_calls_equals_by_hand() -> None:
    model = mlp()
    optimizer = Sharpness(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5")
    evaluate, before = Closure(model, optimizer), masters(optimizer)
    evaluate()
    climbed = [value + 0.05 * gradient.float() for value, gradient in zip(before, gradients(optimizer), strict=True)]
    optimizer.first_step()
    same(model.parameters(), [value.bfloat16() for value in climbed])
    evaluate()
    descended = [value - 0.1 * gradient.float() for value, gradient in zip(before, gradients(optimizer), strict=True)]
    optimizer.second_step()
    torch.testing.assert_close(masters(optimizer), descended, rtol=1e-6, atol=1e-7)


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
def test_sam_at_a_fixed_scale_equals_a_loop_by_hand(whole: bool) -> None:
    (model, optimizer), data = started(make=SharpnessOf, loss_scale=1024.0), batches(6)
    for batch in data:

        def evaluate(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse(model, batch)
            backward(loss, optimizer)
            return loss

        evaluate()
        if whole:
            optimizer.step(evaluate)
        else:
            optimizer.first_step(zero_grad=True)
            evaluate()
            optimizer.second_step(zero_grad=True)
    reference, by_itself = climbing_by_hand(data)
    same(masters(optimizer), reference.parameters())
    mpinit.undo(model)
    same(model.parameters(), reference.parameters())
    momenta = [
        [each.base.state[p]["momentum_buffer"] for p in each.param_groups[0]["params"]]
        for each in (optimizer, by_itself)
    ]
    same(*momenta)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sam_is_refused_where_the_scale_is_dynamic(level: str) -> None:
    model = mlp()
    optimizer = SharpnessOf(model.parameters())
    refused = pytest.raises(ValueError, match=r"SharpnessOf evaluates .*opt_level='O5', .*loss_scale=128.0")
    with refused:
        mpinit.initialize(model, optimizer, level)
    mpinit.initialize(model, opt_level=level, await_optimizers=True)
    with refused:
        mpinit.add_optimizers(optimizer)
    assert "first_step" not in vars(optimizer)


def test_sam_step_uses_plain_gradients_without_scaling() -> None:
    model, optimizer = started("O5", make=SharpnessOf)
    before = masters(optimizer)
    mse(model, BATCH).backward()
    optimizer.first_step(zero_grad=True)
    climbed = masters(optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, climbed, strict=True))
    mse(model, BATCH).backward()
    optimizer.second_step(zero_grad=True)
    assert not any(torch.equal(a, b) for a, b in zip(climbed, masters(optimizer), strict=True))
