"""Several models, optimizers and losses: who skips, whose scale moves, and what a GAN's loop makes of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import backward, batches, gradients, keywords, masters, mlp, momentum, mse, plain_sgd, poison, same
from torch import nn
from torch.optim import SGD, Optimizer

import mpinit

SCALING = ("O1", "O2")


def two(level: str, num_losses: int = 2, **more: Any) -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
    first, second = mlp(seed=1), mlp(seed=2)
    optimizers = [plain_sgd(first.parameters()), plain_sgd(second.parameters())]
    mpinit.initialize([first, second], optimizers, num_losses=num_losses, **keywords(level) | more)
    return first, second, *optimizers


def scales(optimizer: Optimizer, count: int) -> list[float]:
    return [mpinit.loss_scale(optimizer, loss_id) for loss_id in range(count)]


@pytest.mark.parametrize("level", SCALING)
@pytest.mark.parametrize("bad", [0, 1])
def test_only_optimizers_touched_by_the_bad_backward_skip(level: str, bad: int) -> None:
    models_and_optimizers = two(level)
    models, optimizers = models_and_optimizers[:2], models_and_optimizers[2:]
    batch = batches(1)[0]
    before = [masters(optimizer) for optimizer in optimizers]
    for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        loss = mse(model, batch)
        backward(poison(loss, next(model.parameters())) if index == bad else loss, optimizer, loss_id=index)
    for optimizer in optimizers:
        optimizer.step()
    assert [mpinit.step_was_skipped(o) for o in optimizers] == [index == bad for index in range(2)]
    assert scales(optimizers[0], 2) == [512.0 if index == bad else 1024.0 for index in range(2)]
    same(masters(optimizers[bad]), before[bad])
    assert not torch.equal(masters(optimizers[1 - bad])[0], before[1 - bad][0])


@pytest.mark.parametrize("level", SCALING)
def test_one_loss_for_two_optimizers_equals_float32(level: str) -> None:
    first, second, opt1, opt2 = two(level, num_losses=1)
    batch = batches(1)[0]
    references = mlp(seed=1), mlp(seed=2)
    nn.functional.mse_loss(references[0](batch[0]) + references[1](batch[0]), batch[1]).backward()
    loss = nn.functional.mse_loss(first(batch[0]) + second(batch[0]), batch[1])
    backward(loss, [opt1, opt2])
    for reference, optimizer in zip(references, (opt1, opt2), strict=True):
        for got, parameter in zip(gradients(optimizer), reference.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, rtol=0.02, atol=0.003)


@pytest.mark.parametrize("level", SCALING)
def test_an_optimizer_without_gradients_from_the_bad_loss_steps(level: str) -> None:
    first, second, opt1, opt2 = two(level)
    batch = batches(1)[0]
    backward(mse(second, batch), [opt1, opt2], loss_id=1)
    backward(poison(mse(first, batch), next(first.parameters())), [opt1, opt2], loss_id=0)
    for optimizer in (opt1, opt2):
        optimizer.step()
    assert [mpinit.step_was_skipped(o) for o in (opt1, opt2)] == [True, False]
    assert scales(opt1, 2) == [512.0, 1024.0]


@pytest.mark.parametrize("level", SCALING)
def test_losses_at_different_scales_add_up(level: str) -> None:
    model = mlp()
    optimizer = plain_sgd(model.parameters())
    mpinit.initialize(model, optimizer, num_losses=3, **keywords(level))
    reference, data = mlp(), batches(3)
    backward(poison(mse(model, data[0]), next(model.parameters())), optimizer, loss_id=1)
    optimizer.zero_grad()
    for index, batch in enumerate(data):
        backward(mse(model, batch), optimizer, loss_id=index)
        mse(reference, batch).backward()
    assert scales(optimizer, 3) == [1024.0, 512.0, 1024.0]
    for got, parameter in zip(gradients(optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=0.02, atol=0.005)


@pytest.mark.parametrize("level", SCALING)
def test_a_retained_graph_serves_two_losses(level: str) -> None:
    def losses(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        output = model(batches(1)[0][0])
        return output.pow(2).mean(), output.abs().mean()

    model, reference = mlp(), mlp()
    optimizer = plain_sgd(model.parameters())
    mpinit.initialize(model, optimizer, num_losses=2, **keywords(level))
    for index, loss in enumerate(losses(model)):
        with mpinit.scale_loss(loss, optimizer, loss_id=index) as scaled:
            scaled.backward(retain_graph=index == 0)
    sum(losses(reference), torch.zeros(())).backward()
    for got, parameter in zip(gradients(optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=0.02, atol=0.003)


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
    *_, opt1, opt2 = two("O2")
    with pytest.raises(ValueError, match=r"loss_id.*num_losses=2.*0 to 1"):
        mpinit.scale_loss(torch.ones(()), [opt1, opt2], loss_id)


def test_optimizers_of_different_sessions_cannot_share_a_loss() -> None:
    *_, opt1, _ = two("O2")
    *_, opt2, _ = two("O2")
    with pytest.raises(ValueError, match="one initialize call"):
        mpinit.scale_loss(torch.ones(()), [opt1, opt2])


@pytest.mark.parametrize("level", SCALING)
def test_a_parameter_in_two_optimizers_gets_its_gradient_once(level: str) -> None:
    model, reference, data = mlp(), mlp(), batches(2)
    whole, part = SGD(model.parameters(), lr=0.5), SGD(model[0].parameters(), lr=0.25)
    plain = SGD(reference.parameters(), lr=0.5), SGD(reference[0].parameters(), lr=0.25)
    mpinit.initialize(model, [whole, part], **keywords(level))
    for batch in data:
        backward(mse(model, batch), [whole, part])
        mse(reference, batch).backward()
    for optimizer in (whole, part, *plain):
        optimizer.step()
    for got, expected in zip(model.state_dict().values(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=0.02, atol=0.01)


# -- a GAN ----------------------------------------------------------------------------------------------------------


class Gan:
    """The loop of the DCGAN example: two losses for the discriminator, one for the generator through it."""

    def __init__(self, level: str | None, clear: str) -> None:
        torch.manual_seed(3)
        self.net_g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
        self.net_d = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.opt_d, self.opt_g = momentum(self.net_d.parameters()), momentum(self.net_g.parameters())
        self.level, self.clear = level, clear
        if level is not None:
            mpinit.initialize([self.net_d, self.net_g], [self.opt_d, self.opt_g], num_losses=3, **keywords(level))

    def backward(self, loss: torch.Tensor, optimizer: Optimizer, loss_id: int) -> None:
        loss.backward() if self.level is None else backward(loss, optimizer, loss_id)

    def zero(self, model: nn.Module, optimizer: Optimizer) -> None:
        model.zero_grad() if self.clear == "model" else optimizer.zero_grad()

    def iteration(self, real: torch.Tensor, noise: torch.Tensor, bad: int | None = None) -> None:
        criterion = nn.BCEWithLogitsLoss()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        def poisoned(loss: torch.Tensor, loss_id: int, model: nn.Module) -> torch.Tensor:
            return poison(loss, next(model.parameters())) if bad == loss_id else loss

        self.zero(self.net_d, self.opt_d)
        self.backward(poisoned(criterion(self.net_d(real), ones), 0, self.net_d), self.opt_d, 0)
        fake = self.net_g(noise)
        self.backward(poisoned(criterion(self.net_d(fake.detach()), zeros), 1, self.net_d), self.opt_d, 1)
        self.opt_d.step()
        self.zero(self.net_g, self.opt_g)
        self.backward(poisoned(criterion(self.net_d(fake), ones), 2, self.net_g), self.opt_g, 2)
        self.opt_g.step()

    def weights(self) -> list[torch.Tensor]:
        return [*masters(self.opt_d), *masters(self.opt_g)]


def gan_data(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(count)]


@pytest.mark.parametrize("clear", ["model", "optimizer"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_gan_with_three_losses_equals_float32(level: str, clear: str) -> None:
    ours, plain = Gan(level, clear), Gan(None, clear)
    for real, noise in gan_data(5):
        ours.iteration(real, noise)
        plain.iteration(real, noise)
    for got, expected in zip(ours.weights(), plain.weights(), strict=True):
        tolerance = 0.0 if level == "O0" else 0.003
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("clear", ["model", "optimizer"])
@pytest.mark.parametrize(
    ("bad", "skips"), [(0, (True, False)), (1, (True, False)), (2, (False, True))], ids=["real", "fake", "generator"]
)
@pytest.mark.parametrize("level", SCALING)
def test_a_gan_survives_an_overflow_in_any_loss(level: str, bad: int, skips: tuple[bool, bool], clear: str) -> None:
    gan = Gan(level, clear)
    data = gan_data(4)
    gan.iteration(*data[0])
    before = gan.weights()
    gan.iteration(*data[1], bad=bad)
    assert (mpinit.step_was_skipped(gan.opt_d), mpinit.step_was_skipped(gan.opt_g)) == skips
    assert scales(gan.opt_d, 3) == [512.0 if loss_id == bad else 1024.0 for loss_id in range(3)]
    half = len(masters(gan.opt_d))
    for skipped, part in zip(skips, (slice(None, half), slice(half, None)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(gan.weights()[part], before[part], strict=True)) == skipped
    for real, noise in data[2:]:
        gan.iteration(real, noise)
        assert not mpinit.step_was_skipped(gan.opt_d) and not mpinit.step_was_skipped(gan.opt_g)
    assert all(bool(weight.isfinite().all()) for weight in gan.weights())


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
