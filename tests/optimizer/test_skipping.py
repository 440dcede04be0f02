"""Skipped steps: what they leave alone, how they are counted, when they become an error; and steps out of order."""

import cProfile
import logging
import math
import pstats
from functools import partial
from typing import Any

import pytest
import torch
from loops import adam, backward, batches, iterate, masters, mlp, momentum, mse, poison, same, started, train
from models import dynamic
from session_device import device, placed
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

import mpinit

pytestmark = pytest.mark.device

BATCH = batches(1)[0]
SCALING = ("O1", "O2")
OPTIMIZERS: dict[str, Any] = {
    "sgd": momentum,
    "adam": adam,
    "adam single": lambda p: Adam(p, lr=0.01, foreach=False),
    "adamw fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adagrad fused": lambda p: Adagrad(p, lr=0.01, fused=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "adadelta": Adadelta,
}


def overflow(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    iterate(poison(mse(model, batch), next(model.parameters())), optimizer)


def state_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [value.clone() for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", SCALING)
def test_a_skipped_step_does_nothing_at_all(level: str, name: str) -> None:
    if name == "adagrad fused" and device().type == "cuda":
        pytest.skip("torch has no fused Adagrad on CUDA")
    data = batches(6)
    model, optimizer = started(level, make=OPTIMIZERS[name], **dynamic(level, init=64.0))
    clean, fresh = started(level, make=OPTIMIZERS[name], **dynamic(level, init=32.0))
    train(model, optimizer, data[:2])
    before, state, weights = masters(optimizer), state_of(optimizer), [p.clone() for p in model.parameters()]
    overflow(model, optimizer, data[2])
    assert mpinit.step_was_skipped(optimizer) and mpinit.loss_scale(optimizer) == 32.0
    same(masters(optimizer), before)
    same(state_of(optimizer), state)
    same(model.parameters(), weights)
    train(model, optimizer, data[3:])
    train(clean, fresh, data[:2] + data[3:])
    # Scales are powers of two, so that in O1's float32 gradients the scale leaves no trace; in 16 bit it may.
    torch.testing.assert_close(masters(optimizer), masters(fresh), rtol=1e-3, atol=1e-4)


def test_skip_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = started()
    with caplog.at_level(logging.INFO, logger="mpinit"):
        overflow(model, optimizer, BATCH)
    assert [record.getMessage() for record in caplog.records] == [
        "Gradient overflow: optimizer.step() was skipped; loss scale now 512.0; worst: 0.weight, 100% of it inf or nan"
    ]


SCHEDULERS: dict[str, Any] = {
    "step": lambda o: StepLR(o, 2, gamma=0.5),
    "warm-up from 0": lambda o: LambdaLR(o, lambda epoch: epoch / 4),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "chained": lambda o: schedulers.ChainedScheduler([StepLR(o, 2, gamma=0.5), LambdaLR(o, lambda epoch: 0.9**epoch)]),
}


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_skip_on_the_first_step_gives_no_scheduler_warning(name: str, built: str) -> None:
    model = mlp()
    optimizer = momentum(model.parameters())
    scheduler = SCHEDULERS[name](optimizer) if built == "before" else None
    mpinit.initialize(model, optimizer, opt_level="O2")
    scheduler = scheduler or SCHEDULERS[name](optimizer)
    overflow(model, optimizer, BATCH)
    scheduler.step()
    train(model, optimizer, [BATCH])
    scheduler.step()
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_step_advances_only_after_real_steps(name: str) -> None:
    (model, optimizer), rates = started(), []
    reference = momentum(mlp().parameters())
    scheduler, plain = SCHEDULERS[name](optimizer), SCHEDULERS[name](reference)
    for bad in (True, False, True, True, False, False):
        overflow(model, optimizer, BATCH) if bad else train(model, optimizer, [BATCH])
        mpinit.scheduler_step(scheduler)
        if not bad:
            reference.step()
            plain.step()
        rates.append((optimizer.param_groups[0]["lr"], reference.param_groups[0]["lr"]))
    assert all(ours == theirs for ours, theirs in rates) and len(set(rates)) > 1


def test_scheduler_step_passes_arguments() -> None:
    model, optimizer = started()
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for loss, bad in ((1.0, False), (2.0, True), (2.0, False)):
        overflow(model, optimizer, BATCH) if bad else train(model, optimizer, [BATCH])
        mpinit.scheduler_step(scheduler, loss)
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("level", SCALING)
def test_too_many_skips_in_a_row_name_the_parameters(level: str) -> None:
    model, optimizer = started(level, **dynamic(level, max_consecutive_skips=3))

    def one(poisoned: bool) -> None:
        loss = mse(model, BATCH)
        iterate(poison(loss, model[-1].weight, model[-1].bias) if poisoned else loss, optimizer)

    for poisoned in (True, True, False, True, True):
        one(poisoned)
    with pytest.raises(RuntimeError, match=r"3 steps in a row.*3\.bias, 3\.weight, at.*keep_fp32"):
        one(True)
    one(False)
    assert not mpinit.step_was_skipped(optimizer) and mpinit.step_counts(optimizer) == (2, 5)


@pytest.mark.parametrize("level", SCALING)
def test_third_skip_in_a_row_is_logged_with_its_kind(level: str, caplog: pytest.LogCaptureFixture) -> None:
    """Check that it is a warning, which logging shows without configuration, once per row of skips."""
    model, optimizer = started(level)

    def bad_loss() -> None:
        iterate(mse(model, BATCH) * float("inf"), optimizer)

    def bad_gradient() -> None:
        iterate(poison(mse(model, BATCH), model[0].weight), optimizer)

    def said() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return found

    for _ in range(2):
        bad_loss()
    iterate(mse(model, BATCH), optimizer)
    assert said() == []
    for _ in range(4):
        bad_loss()
    (text,) = said()
    assert "3 steps in a row were skipped because the loss itself was inf, so that no loss scale can help" in text
    iterate(mse(model, BATCH), optimizer)
    scale = mpinit.loss_scale(optimizer)
    for _ in range(3):
        bad_gradient()
    (text,) = said()
    assert f"gradients were inf or nan at loss scales down to {scale / 4:g} although the loss was finite" in text
    assert "'0'" in text and "no loss scale can help" not in text


def test_report_of_bad_gradients_everywhere_names_no_module() -> None:
    """Check the report of a nan in a padded row, which makes the gradients of all later modules nan."""
    model, optimizer = started("O2")
    x = torch.ones(2, 6, device=device())
    x[1] = float("nan")
    iterate(model(x)[0].sum(), optimizer)
    report = mpinit.overflow_report(optimizer)
    assert report.loss is not None and math.isfinite(report.loss)
    assert {name.partition(".")[0] for name in report.parameters} == {"0", "3"}
    assert report.first_module is None
    assert "keep_fp32" not in str(report) and "watch_overflow" in report.advice


@pytest.mark.parametrize("level", SCALING)
def test_a_step_inside_of_scale_loss_is_an_error(level: str) -> None:
    model, optimizer = started(level)
    train(model, optimizer, [BATCH])
    before = masters(optimizer)
    with (
        pytest.raises(RuntimeError, match="after the with-block"),
        mpinit.scale_loss(mse(model, BATCH), optimizer) as s,
    ):
        s.backward()
        optimizer.step()
    same(masters(optimizer), before)
    train(model, optimizer, [BATCH])
    assert mpinit.step_counts(optimizer) == (2, 0)


@pytest.mark.parametrize("level", SCALING)
def test_missing_scale_loss_warns_once(level: str) -> None:
    model, optimizer = started(level)
    mse(model, BATCH).backward()
    with pytest.warns(UserWarning, match="scale_loss") as caught:
        optimizer.step()
        optimizer.step()
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_optimizer_of_frozen_parameters_only_steps_harmlessly(level: str) -> None:
    model = mlp()
    frozen = placed(nn.Linear(3, 3)).requires_grad_(False)
    whole = nn.Sequential(model, frozen)
    optimizer, idle = momentum(model.parameters()), SGD(frozen.parameters(), lr=1.0)
    mpinit.initialize(whole, [optimizer, idle], opt_level=level)
    before = [p.clone() for p in frozen.parameters()]
    backward(mse(whole, BATCH), [optimizer, idle])
    optimizer.step()
    idle.step()
    same(frozen.parameters(), before)
    assert not mpinit.step_was_skipped(idle)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_calls_of_a_skipped_step_grow_no_faster_than_the_model(level: str) -> None:
    counts = []
    for layers in (10, 40):
        torch.manual_seed(0)
        model = placed(nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))))
        optimizer = SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, level, loss_scale="dynamic")
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        profile = cProfile.Profile()
        profile.enable()
        with mpinit.scale_loss(model(torch.ones(2, 4, device=device())).square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        profile.disable()
        assert mpinit.step_was_skipped(optimizer)
        report = mpinit.overflow_report(optimizer)
        assert report is not None and len(report.parameters) == 2 * layers
        counts.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
        mpinit.undo(model)
    assert counts[1] < 4.5 * counts[0], counts


def replaced(place: Any, value: float, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with another number in one place."""
    changed = gradient.clone()
    changed[place] = value
    return changed


def test_report_of_an_overflow_lists_bad_gradients_alone() -> None:
    model = placed(nn.ParameterList([torch.ones(3), torch.ones(2, 2), torch.ones(0), torch.ones(()), torch.ones(4)]))
    optimizer = SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O2", loss_scale=mpinit.DynamicLossScale(init=64.0))
    loss = sum(parameter.float().sum() for parameter in model)
    assert isinstance(loss, torch.Tensor)
    for index, place, value in ((1, (0, 1), math.inf), (3, ..., math.nan), (4, slice(2), -math.inf)):
        model[index].register_hook(partial(replaced, place, value))
    with mpinit.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    report = mpinit.overflow_report(optimizer)
    assert report is not None
    found = {bad.name: (bad.infs, bad.nans, bad.elements, bad.largest_finite) for bad in report.gradients}
    assert found == {"1": (1, 0, 4, 1.0), "3": (0, 1, 1, 0.0), "4": (2, 0, 4, 1.0)}


@pytest.mark.parametrize("bad", ["discriminator", "generator"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", SCALING)
def test_overflow_counts_once_if_losses_have_all_optimizers(level: str, fused: bool, bad: str) -> None:
    """Compare with a GAN's loop that passes the optimizer that will step; Lightning and Accelerate pass both."""

    def trained(passes_all: bool) -> tuple[list[torch.Tensor], list[Any]]:
        torch.manual_seed(0)
        generator, critic = placed(nn.Linear(4, 4)), placed(nn.Linear(4, 1))
        optimizers = [Adam(model.parameters(), lr=0.01, fused=fused) for model in (generator, critic)]
        mpinit.initialize([generator, critic], optimizers, level, **dynamic(level, init=64.0))
        log: list[Any] = []
        for index in range(6):
            x = placed(torch.randn(8, 4, generator=torch.Generator().manual_seed(index)))
            for own, kind in ((1, "discriminator"), (0, "generator")):
                fake = generator(x)
                loss = critic(fake.detach() if own else fake).float().square().mean()
                model = critic if own else generator
                loss = poison(loss, next(model.parameters())) if index == 2 and kind == bad else loss
                optimizers[own].zero_grad()
                with mpinit.scale_loss(loss, optimizers if passes_all else optimizers[own]) as scaled:
                    scaled.backward()
                optimizers[own].step()
                log.append((mpinit.loss_scale(optimizers[0]), *map(mpinit.step_counts, optimizers)))
        return [*generator.state_dict().values(), *critic.state_dict().values()], log

    (found, log), (expected, expected_log) = trained(True), trained(False)
    assert log == expected_log and log[-1][0] == 32.0
    same(found, expected)
