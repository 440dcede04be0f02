"""Several models, optimizers and losses; which of them skip and whose scale moves, tests/promises/test_law.py has."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from loops import backward, batches, gradients, keywords, masters, mlp, momentum, mse, plain_sgd, poison, same, start
from torch import nn
from torch.optim import Optimizer

import mpinit

pytestmark = pytest.mark.device


def test_a_loss_for_no_optimizer_is_scaled_and_leaves_everything_alone() -> None:
    model = mlp()
    optimizer = plain_sgd(model.parameters())
    mpinit.initialize(model, optimizer, **keywords("O2"))
    before = masters(optimizer)
    inputs = batches(1)[0][0].requires_grad_()
    with mpinit.scale_loss(model(inputs).sum(), []) as scaled:
        (gradient,) = torch.autograd.grad(scaled, inputs)
    reference = mlp()
    (expected,) = torch.autograd.grad(reference(inputs).sum(), inputs)
    torch.testing.assert_close(gradient / 1024, expected, rtol=0.02, atol=0.003)
    same(gradients(optimizer), [None] * 4)
    optimizer.step()
    same(masters(optimizer), before)
    assert mpinit.loss_scale(optimizer) == 1024.0


def test_a_loss_for_no_optimizer_without_a_session_stays_as_it_is() -> None:
    loss = torch.ones((), requires_grad=True)
    with mpinit.scale_loss(loss, []) as scaled:
        assert scaled is loss


@pytest.mark.parametrize("loss_id", [-1, 2, "0", 1.0])
def test_an_unknown_loss_is_refused(loss_id: Any) -> None:
    optimizer = start(mlp(), num_losses=2)
    for use in (mpinit.loss_scale, functools.partial(mpinit.scale_loss, torch.ones(()))):
        with pytest.raises(ValueError, match=rf"loss_id={loss_id!r}.*num_losses=2.*0 to 1"):
            use(optimizer, loss_id)


# -- a GAN ----------------------------------------------------------------------------------------------------------


def trained_gan(level: str | None, clear: str) -> list[torch.Tensor]:
    """The loop of the DCGAN example: two losses for the discriminator, one for the generator through it."""
    torch.manual_seed(3)
    net_g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
    net_d = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    opt_d, opt_g = momentum(net_d.parameters()), momentum(net_g.parameters())
    if level is not None:
        mpinit.initialize([net_d, net_g], [opt_d, opt_g], num_losses=3, **keywords(level))

    def add(output: torch.Tensor, target: float, optimizer: Optimizer, loss_id: int) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(output, torch.full_like(output, target))
        loss.backward() if level is None else backward(loss, optimizer, loss_id)

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
    return [*masters(opt_d), *masters(opt_g)]


@pytest.mark.parametrize("clear", ["model", "optimizer"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_gan_with_three_losses_equals_float32(level: str, clear: str) -> None:
    plain = trained_gan(None, clear)
    tolerance = 0.0 if level == "O0" else 0.003
    for got, expected in zip(trained_gan(level, clear), plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_sessions_do_not_touch_one_another() -> None:
    first, second = mlp(), mlp()
    lone = copy.deepcopy(second)
    opt1, opt2, reference = (momentum(model.parameters()) for model in (first, second, lone))
    mpinit.initialize(first, opt1, **keywords("O2"))
    mpinit.initialize(second, opt2, **keywords("O2", torch.bfloat16))
    mpinit.initialize(lone, reference, **keywords("O2", torch.bfloat16))
    for batch in batches(4):
        for model, optimizer in ((first, opt1), (second, opt2), (lone, reference)):
            optimizer.zero_grad()
            loss = mse(model, batch)
            backward(poison(loss, next(model.parameters())) if model is first else loss, optimizer)
            optimizer.step()
    same(masters(opt2), masters(reference))
    assert mpinit.step_counts(opt1) == (0, 4) and mpinit.step_counts(opt2) == (4, 0)
