"""mpinit.GradScaler: what torch's own GradScaler tests ask of theirs, and which sessions it takes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from loops import batches, gradients, mlp, mse, plain_sgd, poison, same
from scaler_loops import SCALED, begin, each_scaled, gradients_of
from torch import nn
from torch.optim import SGD, AdamW

import mpinit

# -- scale ------------------------------------------------------------------------------------------------------------


def test_scale_of_tensors_and_nested_iterables() -> None:
    _, _, scaler = begin()
    one, two = torch.full((1,), 4.0), torch.full((1,), 5.0, dtype=torch.float64)
    assert scaler.scale(one).tolist() == [32.0]
    assert scaler.scale(two).dtype is torch.float64
    assert scaler.scale(one.half()).dtype is torch.float32
    nested = scaler.scale([one, (one, [two])])
    assert isinstance(nested, list) and isinstance(nested[1], tuple)
    assert nested[1][1][0].tolist() == [40.0]
    generator = scaler.scale(t for t in (one, two))
    assert not isinstance(generator, (list, tuple)) and [t.item() for t in generator] == [32.0, 40.0]
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale(3.0)


@each_scaled
def test_gradients_are_scaled_until_they_are_unscaled(setting: str) -> None:
    expected = gradients_of(setting)
    model, optimizer, scaler = begin(setting)
    for times in (1, 2):
        scaler.scale(mse(model, batches(1)[0])).backward()
        same([p.grad.float() for p in model.parameters()], [g.float() * 8 * times for g in expected if g is not None])
    scaler.unscale_(optimizer)
    same([p.grad.float() for p in model.parameters()], [g.float() * 2 for g in expected if g is not None])
    same(gradients(optimizer), [g * 2 for g in expected if g is not None])


# -- order ------------------------------------------------------------------------------------------------------------


@each_scaled
def test_calls_out_of_order(setting: str) -> None:
    model, optimizer, scaler = begin(setting)
    for call in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer), scaler.update):
        with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
            call()
    loss = scaler.scale(mse(model, batches(1)[0]))
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    del loss
    scaler.update(8.0)
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: None)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, lambda: None)


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_the_same_errors_where_nothing_is_scaled(level: str) -> None:
    model = mlp()
    optimizer = plain_sgd(model.parameters())
    mpinit.initialize(model, optimizer, level, verbosity=0)
    scaler = mpinit.GradScaler(optimizer)
    scaler.scale(mse(model, batches(1)[0]))
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.is_enabled() and scaler.get_scale() == 1.0
    scaler.update(64.0)
    assert scaler.get_scale() == 1.0


# -- skipping, and the scale ------------------------------------------------------------------------------------------


@each_scaled
@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_an_overflow_skips_and_backs_off_at_update(setting: str, kind: str) -> None:
    def fused(parameters: Any) -> Any:
        return AdamW(parameters, lr=0.01, fused=True)

    model, optimizer, scaler = begin(setting, fused if kind == "fused" else plain_sgd)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(poison(mse(model, batches(1)[0]), model[0].weight)).backward()
    assert scaler.step(optimizer) is None
    assert scaler.get_scale() == 8.0
    scaler.update()
    assert scaler.get_scale() == 4.0 == mpinit.loss_scale(optimizer)
    same(before.values(), model.state_dict().values())
    assert mpinit.step_counts(optimizer) == (0, 1)
    scheduler.step()
    optimizer.zero_grad()
    for _ in range(2):
        scaler.scale(mse(model, batches(1)[0])).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 8.0 and mpinit.step_counts(optimizer) == (2, 1)


def test_an_overflow_in_one_of_two_optimizers() -> None:
    models = [mlp(0), mlp(1)]
    optimizers = [plain_sgd(model.parameters()) for model in models]
    mpinit.initialize(models, optimizers, **SCALED["O2"])
    scaler = mpinit.GradScaler(optimizers)
    loss = mse(models[0], batches(1)[0]) + mse(models[1], batches(1)[0])
    scaler.scale(poison(loss, models[0][0].weight)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [mpinit.step_counts(optimizer) for optimizer in optimizers] == [(0, 1), (1, 0)]
    assert scaler.get_scale() == 4.0


def test_sparse_gradients() -> None:
    model = nn.EmbeddingBag(4, 2, mode="sum", sparse=True)
    optimizer = SGD(model.parameters(), lr=1.0)
    mpinit.initialize(model, optimizer, **SCALED["O0"])
    scaler = mpinit.GradScaler(optimizer)
    scaler.scale(model(torch.tensor([[0, 0, 1]])).sum()).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad is not None
    assert model.weight.grad.to_dense().tolist() == [[2, 2], [1, 1], [0, 0], [0, 0]]
    scaler.step(optimizer)


def test_update_with_a_scale() -> None:
    model, optimizer, scaler = begin()
    scaler.scale(poison(mse(model, batches(1)[0]), model[0].weight)).backward()
    scaler.step(optimizer)
    scaler.update(torch.tensor([32.0]))
    assert scaler.get_scale() == 32.0
    scaler.update(16)
    assert scaler.get_scale() == 16.0
    for wrong, error in (
        (torch.ones(2), AssertionError),
        ("8", TypeError),
        (0.0, ValueError),
        (float("nan"), ValueError),
    ):
        with pytest.raises(error):
            scaler.update(wrong)  # type: ignore[arg-type]
    assert scaler.get_scale() == 16.0


def test_getters_setters_and_states_are_torchs() -> None:
    model, optimizer, scaler = begin()
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    assert scaler.state_dict() == theirs.state_dict()
    for each in (scaler, theirs):
        each.set_growth_factor(3.0)
        each.set_backoff_factor(0.25)
        each.set_growth_interval(5)
    assert scaler.state_dict() == theirs.state_dict()
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 5)
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    state = scaler.state_dict()
    assert state["_growth_tracker"] == 1
    theirs.load_state_dict(state)
    assert theirs.state_dict() == state
    saved = torch.amp.GradScaler("cpu", init_scale=2.0, growth_factor=4.0, backoff_factor=0.75, growth_interval=7)
    scaler.load_state_dict(saved.state_dict())
    assert scaler.state_dict() == saved.state_dict()
    for wrong in ({"scale": 2.0}, saved.state_dict() | {"scale": -1.0}, saved.state_dict() | {"growth_factor": "x"}):
        with pytest.raises(ValueError):
            scaler.load_state_dict(wrong)
        assert scaler.state_dict() == saved.state_dict()
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        scaler.load_state_dict({})
    for wrong_interval in (0, 1.5, True):
        with pytest.raises(ValueError, match="growth_interval must be a whole number above 0"):
            scaler.set_growth_interval(wrong_interval)  # type: ignore[arg-type]


def test_a_loss_of_its_own_scaler() -> None:
    model, optimizer, _ = begin(num_losses=2)
    first, second = mpinit.GradScaler(optimizer), mpinit.GradScaler(model, loss_id=1)
    second.update = second.update
    second.scale(torch.ones(()))
    second.update(32.0)
    assert (first.get_scale(), second.get_scale()) == (8.0, 32.0)
    first.scale(mse(model, batches(1)[0])).backward()
    with pytest.raises(RuntimeError, match="scaled by the scale of another loss"):
        second.scale(mse(model, batches(1)[0])).backward()
    with pytest.raises(RuntimeError, match="scaled by the scale of another loss"):
        second.unscale_(optimizer)
    first.step(optimizer)
    with pytest.raises(ValueError, match="loss_id=2"):
        mpinit.GradScaler(optimizer, loss_id=2)


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_optimizers_of_no_session_or_another() -> None:
    _, optimizer, scaler = begin()
    model = mlp()
    other = plain_sgd(model.parameters())
    with pytest.raises(RuntimeError, match="was not initialised"):
        mpinit.GradScaler(other)
    with pytest.raises(ValueError, match="needs an initialised optimizer"):
        mpinit.GradScaler([])
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="was not initialised"):
        scaler.step(other)
    mpinit.initialize(model, other, **SCALED["O2"])
    with pytest.raises(ValueError, match="make one for each session"):
        scaler.step(other)
    with pytest.raises(ValueError, match="at once"):
        mpinit.GradScaler([optimizer, other])


@pytest.mark.parametrize("how", ["initialize", "enabled"])
def test_disabled(how: str) -> None:
    model = mlp()
    optimizer = plain_sgd(model.parameters())
    mpinit.initialize(model, optimizer, "O5", enabled=how == "enabled", verbosity=0)
    scaler = mpinit.GradScaler(optimizer, enabled=how != "enabled")
    loss = mse(model, batches(1)[0])
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    assert scaler.get_growth_interval() == 2000
    mpinit.undo(optimizer)


def test_undone_while_gradients_are_scaled() -> None:
    expected = gradients_of("O2")
    model, optimizer, scaler = begin()
    scaler.scale(mse(model, batches(1)[0])).backward()
    mpinit.undo(model)
    same([p.grad for p in model.parameters()], expected)
    with pytest.raises(RuntimeError, match="was undone: make another"):
        scaler.scale(torch.ones(()))
    with pytest.raises(TypeError, match=r"save scaler\.state_dict"):
        pickle.dumps(scaler)
    optimizer.step()


def test_an_exception_in_the_backward_pass() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *upstream: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError

    expected = gradients_of("O2")
    model, optimizer, scaler = begin()
    loss = Fails.apply(model[0](batches(1)[0][0])).sum() + model[-1].weight.sum()  # type: ignore[no-untyped-call]
    with pytest.raises(ArithmeticError):
        scaler.scale(loss).backward()
    optimizer.zero_grad()
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.unscale_(optimizer)
    same(gradients(optimizer), expected)
