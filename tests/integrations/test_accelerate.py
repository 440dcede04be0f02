"""The Accelerate plug against Accelerate itself, beside the same loop written with mpinit alone."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from frameworks import ALL, LEVELS, same_bits
from loops import Batch, backward, batches, mlp, mse
from models import sgd
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import mpinit
from mpinit.integrations.accelerate import attach

MIXED = {name: level for name, level in LEVELS.items() if name != "O3"}
Parts = tuple[Accelerator, Any, Any, Any]
LARGE = {"opt_level": "O2", "loss_scale": mpinit.DynamicLossScale(init=2.0**40, max=2.0**50, growth_interval=4)}


def made(level: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mpinit.initialize(model, optimizer, **level)
    return model, optimizer


def accelerated(level: dict[str, Any], prepared_first: bool = False, steps: int = 1) -> Parts:
    model, optimizer = made(level)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    if not prepared_first:
        attach(accelerator, optimizer)
    scheduler = ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if prepared_first:
        attach(accelerator, optimizer)
    return accelerator, model, optimizer, scheduler


def run(parts: Parts, data: list[Batch]) -> None:
    accelerator, model, optimizer, scheduler = parts
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(mse(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def bare(level: dict[str, Any], data: list[Batch]) -> dict[str, Any]:
    model, optimizer = made(level)
    scheduler = ExponentialLR(optimizer, 0.9)
    for number, batch in enumerate(data, start=1):
        backward(mse(model, batch) / 2, optimizer)
        if number % 2 == 0:
            mpinit.clip_grad_norm_(optimizer, 0.5)
            optimizer.step()
            mpinit.scheduler_step(scheduler)
            optimizer.zero_grad()
    state = model.state_dict()
    mpinit.undo(model)
    return state


@pytest.mark.parametrize("level", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("prepared_first", [False, True], ids=["attached first", "prepared first"])
def test_accelerate_trains_as_the_bare_loop_does(level: dict[str, Any], prepared_first: bool) -> None:
    parts = accelerated(level, prepared_first, steps=2)
    run(parts, batches(12))
    assert same_bits(parts[1].state_dict(), bare(level, batches(12)))


@pytest.mark.parametrize("level", [*ALL.values(), LARGE], ids=[*ALL, "O2, overflowing"])
def test_saved_state_resumes_bit_for_bit(level: dict[str, Any], tmp_path: Path) -> None:
    data = batches(16)
    through = accelerated(level)
    run(through, data[:8])
    through[0].save_state(str(tmp_path))
    run(through, data[8:])
    resumed = accelerated(level)
    resumed[0].load_state(str(tmp_path))
    run(resumed, data[8:])
    assert same_bits(through[1].state_dict(), resumed[1].state_dict())
    assert mpinit.state_dict(through[2].optimizer) == mpinit.state_dict(resumed[2].optimizer)
    assert through[3].get_last_lr() == resumed[3].get_last_lr()


@pytest.mark.parametrize("prepared_first", [False, True], ids=["attached first", "prepared first"])
def test_skipped_step_is_reported_and_scheduler_does_not_step(prepared_first: bool) -> None:
    accelerator, model, optimizer, scheduler = parts = accelerated({"opt_level": "O2"}, prepared_first)
    run(parts, batches(1))
    assert not accelerator.optimizer_step_was_skipped
    rate, state = scheduler.get_last_lr(), copy.deepcopy(model.state_dict())
    accelerator.backward(mse(model, batches(1)[0]) * float("inf"))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    assert accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == rate and same_bits(model.state_dict(), state)
    assert mpinit.step_counts(optimizer.optimizer) == (1, 1)
    run(parts, batches(1))
    assert not accelerator.optimizer_step_was_skipped and scheduler.get_last_lr() != rate


def test_an_optimizer_that_is_attached_later_takes_part() -> None:
    models = [mlp(0), mlp(1)]
    optimizers = [sgd(model) for model in models]
    mpinit.initialize(models, optimizers, opt_level="O2")
    accelerator = Accelerator(cpu=True)
    prepared = [accelerator.prepare(optimizer) for optimizer in optimizers]
    for optimizer in prepared:
        attach(accelerator, optimizer)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    accelerator.backward(mse(models[0], batches(1)[0]) + mse(models[1], batches(1)[0]))
    for optimizer in prepared:
        optimizer.step()
    for optimizer, model, state in zip(optimizers, models, before, strict=True):
        assert mpinit.step_counts(optimizer) == (1, 0)
        assert not same_bits(model.state_dict(), state)
        assert all(p.grad.abs().max() < 10 for p in mpinit.master_params(optimizer))


def test_undo_detaches_the_accelerator() -> None:
    accelerator, model, optimizer, _ = parts = accelerated({"opt_level": "O2"})
    run(parts, batches(2))
    mpinit.undo(model)
    assert accelerator.scaler is None and optimizer.scaler is None
    run(parts, batches(2))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:the state was saved where losses were not scaled")
@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(["O1", "O2", "O5"], 2)])
def test_a_state_is_loaded_at_another_level(before: str, after: str, tmp_path: Path) -> None:
    saved, resumed = accelerated(LEVELS[before]), accelerated(LEVELS[after])
    run(saved, batches(4))
    saved[0].save_state(str(tmp_path))
    resumed[0].load_state(str(tmp_path))
    assert same_bits(saved[1].state_dict(), resumed[1].state_dict())
    scales = [mpinit.loss_scale(parts[2].optimizer) for parts in (saved, resumed)]
    assert scales == [{"O5": 1.0}.get(level, 2.0**16) for level in (before, after)]
    run(resumed, batches(4))
    assert not same_bits(saved[1].state_dict(), resumed[1].state_dict())


def test_accelerator_with_own_casts_is_refused() -> None:
    optimizer = made({"opt_level": "O2"})[1]
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(ValueError, match=r"mixed_precision='bf16' casts once more .* mixed_precision=\"no\""):
        attach(accelerator, optimizer)
    assert accelerator.scaler is None


def test_an_optimizer_that_is_not_initialised_is_refused() -> None:
    with pytest.raises(RuntimeError, match="not initialised"):
        attach(Accelerator(cpu=True), sgd(mlp()))


def test_an_empty_list_of_optimizers_is_refused() -> None:
    with pytest.raises(ValueError, match="got an empty list"):
        attach(Accelerator(cpu=True), [])


def test_swapped_arguments_are_refused_in_words() -> None:
    _, optimizer = made({"opt_level": "O5"})
    with pytest.raises(TypeError, match=r"needs an Accelerator first, not AdamW: are they swapped\?"):
        attach(optimizer, Accelerator(cpu=True))


@pytest.mark.parametrize("level", [None, "O5"])
def test_audit_of_a_prepared_optimizer_steps_nothing(level: Any) -> None:
    """Check that the function which Accelerate puts in the place of ``step`` does not run on the original."""
    model = mlp().bfloat16() if level is None else mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if level is not None:
        mpinit.initialize(model, optimizer, level)
    accelerator = Accelerator(cpu=True)
    attach(accelerator, optimizer) if level is not None else None
    wrapped, prepared = accelerator.prepare(model, optimizer)
    x = torch.ones(2, 6, dtype=next(model.parameters()).dtype)
    accelerator.backward(wrapped(x).float().square().mean())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = mpinit.audit(wrapped, prepared)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()) and not optimizer.state
    assert found.stuck and max(found.stuck.values()) < 1.0
