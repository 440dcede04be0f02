"""Several backward passes a step: accumulated, of several losses, of several optimizers."""

from typing import Any

import loops
import pytest
import torch
from masters_by_hand import WEIGHTS, ByHand
from models import Parts
from torch import nn
from torch.optim import Optimizer

import mpinit

pytestmark = pytest.mark.device

LEVELS = ("O0", "O1", "O2", "O3")
DELAYS: tuple[dict[str, bool], ...] = ({}, {"delay_unscale": True}, {"delay_overflow_check": True})


@pytest.mark.parametrize("delay", DELAYS, ids=str)
@pytest.mark.parametrize("setting", ["O2", "O5"])
def test_cycles_equal_a_hand_written_loop(setting: str, delay: dict[str, bool]) -> None:
    model, data = loops.mlp(), loops.batches(12)
    by_hand = ByHand(model, setting)
    optimizer = loops.start(model, "O2", WEIGHTS[setting])
    for index, batch in enumerate(data):
        last = index % 3 == 2
        by_hand.backward(batch, scale=mpinit.loss_scale(optimizer))
        loops.backward(loops.mse(model, batch), optimizer, **({} if last else delay))
        if last:
            optimizer.step()
            optimizer.zero_grad()
            by_hand.step()
            by_hand.clear()
    loops.same(loops.masters(optimizer), by_hand.masters)
    loops.same(model.parameters(), by_hand.model.parameters())


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("loss_scale", [mpinit.DynamicLossScale(init=256.0, growth_interval=100), 1.0, 128.0])
@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, True), (torch.bfloat16, True), (torch.bfloat16, "split")])
def test_300_micro_batches_give_300(dtype: torch.dtype, kind: Any, loss_scale: Any, delay: bool) -> None:
    model = Parts(lambda self: self.weight.sum(), weight=nn.Parameter(torch.zeros(3)))
    optimizer = loops.start(model, "O2", dtype, loops.plain_sgd, loss_scale=loss_scale, master_weights=kind)
    for _ in range(300):
        loops.backward(model(), optimizer, delay_unscale=delay)
    assert [g.tolist() for g in loops.gradients(optimizer) if g is not None] == [[300.0] * 3]
    optimizer.step()
    assert loops.masters(optimizer)[0].tolist() == [-300.0] * 3


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_clearing_inside_of_scale_loss_clears_what_was_there(level: str, bad: bool, set_to_none: bool) -> None:
    (model, optimizer), (fresh, reference) = loops.started(level), loops.started(level)
    first, second = loops.batches(2)
    loss = loops.mse(model, first)
    loops.backward(loops.poison(loss, next(model.parameters())) if bad else loss, optimizer)
    with mpinit.scale_loss(loops.mse(model, second), optimizer) as scaled:
        optimizer.zero_grad(set_to_none)
        scaled.backward()
    loops.backward(loops.mse(fresh, second), reference)
    torch.testing.assert_close(loops.gradients(optimizer), loops.gradients(reference), rtol=1e-2, atol=1e-4)
    optimizer.step()
    # The first block has overflowed, and no step came before the second one.
    assert mpinit.step_was_skipped(optimizer) == (bad and level in ("O1", "O2"))


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_from_before_initialize_count(level: str) -> None:
    model, batch = loops.mlp(), loops.batches(1)[0]
    loops.mse(model, batch).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer = loops.start(model, level)
    loops.backward(loops.mse(model, batch) * 0.0, optimizer)
    loops.same(loops.gradients(optimizer), [each.half() if level == "O3" else each for each in before])


@pytest.mark.parametrize("level", LEVELS)
def test_a_retained_graph_gives_its_gradient_again(level: str) -> None:
    model, optimizer = loops.started(level)
    loss = loops.mse(model, loops.batches(1)[0])
    with mpinit.scale_loss(loss, optimizer) as scaled:
        scaled.backward(retain_graph=True)
    once = loops.gradients(optimizer)
    loops.backward(loss, optimizer)
    loops.same(loops.gradients(optimizer), [None if g is None else g * 2 for g in once])


@pytest.mark.parametrize("first", [0, 1])
def test_delayed_check_updates_the_scale_at_the_first_step(first: int) -> None:
    models, batch = [loops.mlp(), loops.mlp(1)], loops.batches(1)[0]
    optimizers = [loops.momentum(model.parameters()) for model in models]
    mpinit.initialize(models, optimizers, opt_level="O2", loss_scale=mpinit.DynamicLossScale(init=4.0))
    loss = loops.poison(loops.mse(models[0], batch) + loops.mse(models[1], batch), models[0][0].weight)
    loops.backward(loss, optimizers, delay_overflow_check=True)
    assert mpinit.loss_scale(optimizers[0]) == 4.0
    optimizers[first].step()
    assert mpinit.loss_scale(optimizers[0]) == 2.0
    optimizers[1 - first].step()
    assert mpinit.loss_scale(optimizers[0]) == 2.0


def test_loss_without_optimizer_is_scaled_and_changes_nothing() -> None:
    model, optimizer = loops.started("O2", make=loops.plain_sgd)
    before = loops.masters(optimizer)
    inputs = loops.batches(1)[0][0].requires_grad_()
    with mpinit.scale_loss(model(inputs).sum(), []) as scaled:
        (gradient,) = torch.autograd.grad(scaled, inputs)
    (expected,) = torch.autograd.grad(loops.mlp()(inputs).sum(), inputs)
    torch.testing.assert_close(gradient / 1024, expected, rtol=0.02, atol=0.003)
    loops.same(loops.gradients(optimizer), [None] * 4)
    optimizer.step()
    loops.same(loops.masters(optimizer), before)
    assert mpinit.loss_scale(optimizer) == 1024.0


def test_loss_without_optimizer_and_session_is_unchanged() -> None:
    loss = torch.ones((), requires_grad=True)
    with mpinit.scale_loss(loss, []) as scaled:
        assert scaled is loss


def trained_gan(level: str | None, clear: str) -> list[torch.Tensor]:
    """The loop of the DCGAN example: two losses for the discriminator, one for the generator through it."""
    torch.manual_seed(3)
    net_g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
    net_d = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    opt_d, opt_g = loops.momentum(net_d.parameters()), loops.momentum(net_g.parameters())
    if level is not None:
        mpinit.initialize([net_d, net_g], [opt_d, opt_g], num_losses=3, **loops.keywords(level))

    def add(output: torch.Tensor, target: float, optimizer: Optimizer, loss_id: int) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(output, torch.full_like(output, target))
        loss.backward() if level is None else loops.backward(loss, optimizer, loss_id)

    for _ in range(5):
        real, noise = torch.randn(8, 6), torch.randn(8, 4)
        (net_d if clear == "model" else opt_d).zero_grad()
        add(net_d(real), 1.0, opt_d, 0)
        fake = net_g(noise)
        add(net_d(fake.detach()), 0.0, opt_d, 1)
        opt_d.step()
        (net_g if clear == "model" else opt_g).zero_grad()
        add(net_d(fake), 1.0, opt_g, 2)
        opt_g.step()
    return [*loops.masters(opt_d), *loops.masters(opt_g)]


@pytest.mark.parametrize("clear", ["model", "optimizer"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_gan_with_three_losses_equals_float32(level: str, clear: str) -> None:
    tolerance = 0.0 if level == "O0" else 0.003
    torch.testing.assert_close(trained_gan(level, clear), trained_gan(None, clear), rtol=tolerance, atol=tolerance)
